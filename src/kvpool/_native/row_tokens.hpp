// The tokens of a step, as they come from Python.
#pragma once
#include <memory>

#include "binding.hpp"

namespace kvpool {

// Token ids from 0 to 2**63 - 1, out of a list or tuple of plain ints, or an array of int32 or int64. Whatever else it
// is does not `fit`: Python knows what to do with it.
class RowTokens {
 public:
  explicit RowTokens(PyObject* given) {
    if (PyList_Check(given) || PyTuple_Check(given)) {
      read_items(given);
    } else if (PyObject_CheckBuffer(given)) {
      read_array(given);
    }
  }
  RowTokens(const RowTokens&) = delete;
  RowTokens& operator=(const RowTokens&) = delete;

  bool fit() const { return fit_; }
  size_t size() const { return size_; }
  const int64_t* data() const { return size_ <= kFew ? few_ : many_.get(); }

 private:
  static constexpr size_t kFew = 64;

  void read_items(PyObject* given) {
    const Items items(given);
    int64_t* to = room(items.size());
    for (size_t i = 0; i < size_; i++) {
      PyObject* item = items[i];
      int is_too_large = 0;
      to[i] = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &is_too_large) : -1;
      if (to[i] < 0) return;
    }
    fit_ = true;
  }

  void read_array(PyObject* given) {
    try {
      buffer_.open(given);
    } catch (const Raised&) {
      PyErr_Clear();  // one with steps, for example
      return;
    }
    if (!buffer_.has_integers() || buffer_.num_axes() != 1) return;
    const char* from = buffer_.data<char>();
    const bool is_narrow = buffer_.item() == 4;
    int64_t* to = room(buffer_.length() / buffer_.item());
    int64_t all = 0;
    for (size_t i = 0; i < size_; i++) {
      int32_t narrow;
      if (is_narrow) {
        std::memcpy(&narrow, from + 4 * i, 4);
        to[i] = narrow;
      } else {
        std::memcpy(&to[i], from + 8 * i, 8);
      }
      all |= to[i];
    }
    fit_ = all >= 0;
  }

  int64_t* room(size_t size) {
    size_ = size;
    if (size <= kFew) return few_;
    many_.reset(new int64_t[size]);
    return many_.get();
  }

  Buffer buffer_;
  int64_t few_[kFew];
  std::unique_ptr<int64_t[]> many_;
  size_t size_ = 0;
  bool fit_ = false;
};

}  // namespace kvpool
