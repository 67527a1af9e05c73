// Hashing from Python.
#include "binding.hpp"
#include "hashing.hpp"

namespace kvpool {

namespace {

constexpr size_t kLong = 32;  // blocks; for more of them other threads may run meanwhile

// Token ids below 2^32, out of a list, an iterable, or an array of int32 or int64. Whatever else it is does not `fit`:
// the Python core knows what to do with it.
class Tokens {
 public:
  explicit Tokens(PyObject* given, int num_axes = 1) {
    if (is_row_of_bytes(given)) {
      read_array(given, num_axes);
    } else {
      read_items(given);
    }
  }

  bool fit() const { return fit_; }
  const uint32_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void read_array(PyObject* given, int num_axes) {
    try {
      buffer_.open(given);
    } catch (const Raised&) {
      PyErr_Clear();  // one with steps, for example
      fit_ = false;
      return;
    }
    fit_ = buffer_.has_integers() && buffer_.num_axes() == num_axes;
    if (!fit_) return;
    size_ = buffer_.length() / buffer_.item();
    const char* from = buffer_.data<char>();
    uint64_t all = 0;
    if (buffer_.item() == 4 && buffer_.is_aligned()) {
      data_ = buffer_.data<uint32_t>();
      for (size_t i = 0; i < size_; i++) all |= data_[i];
      fit_ = !(all >> 31);
      return;
    }
    own_.resize(size_);
    for (size_t i = 0; i < size_; i++) {
      int64_t token = 0;
      if (buffer_.item() == 4) {
        int32_t small;
        std::memcpy(&small, from + 4 * i, 4);
        token = small;
      } else {
        std::memcpy(&token, from + 8 * i, 8);
      }
      all |= static_cast<uint64_t>(token);
      own_[i] = static_cast<uint32_t>(token);
    }
    fit_ = !(all >> 32);
    data_ = own_.data();
  }

  void read_items(PyObject* given) {
    const Items items(given);
    own_.reserve(items.size());
    for (size_t i = 0; fit_ && i < items.size(); i++) {
      PyObject* item = items[i];
      int is_too_large = 0;
      const long long token = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &is_too_large) : -1;
      fit_ = !is_too_large && token >= 0 && token < 1LL << 32;
      own_.push_back(static_cast<uint32_t>(token));
    }
    data_ = own_.data();
    size_ = own_.size();
  }

  Buffer buffer_;
  std::vector<uint32_t> own_;
  const uint32_t* data_ = nullptr;
  size_t size_ = 0;
  bool fit_ = true;
};

Encoded bytes_of(PyObject* given, const char* what) {
  if (!PyBytes_Check(given)) raise(PyExc_TypeError, "%s are bytes, not %R", what, given);
  return {reinterpret_cast<const uint8_t*>(PyBytes_AsString(given)), static_cast<size_t>(PyBytes_Size(given))};
}

const uint8_t* parent_of(PyObject* given) {
  const Encoded parent = bytes_of(given, "parents");
  if (parent.length != 32) raise(PyExc_ValueError, "a parent has 32 bytes, not %zd", parent.length);
  return parent.bytes;
}

uint32_t block_size_of(PyObject* given) {
  const long long size = integer(given);
  if (size < 1 || size > INT32_MAX) raise(PyExc_ValueError, "a block has 1 to %d tokens, not %lld", INT32_MAX, size);
  return static_cast<uint32_t>(size);
}

// The encoded extra keys of the first blocks; kept alive by a list of our own.
class Extras {
 public:
  Extras(PyObject* given, size_t count) {
    if (!given || given == Py_None) return;
    kept_ = Ref::made(PySequence_List(given));
    const size_t size = PyList_Size(kept_.get());
    extras_.resize(count);
    for (size_t i = 0; i < count && i < size; i++) {
      PyObject* item = PyList_GetItem(kept_.get(), i);
      if (item != Py_None) extras_[i] = bytes_of(item, "encoded extra keys");
    }
  }

  const Encoded* data() const { return extras_.empty() ? nullptr : extras_.data(); }

 private:
  Ref kept_;
  std::vector<Encoded> extras_;
};

// Let other threads run until the end of the scope.
class WithoutTheLock {
 public:
  explicit WithoutTheLock(bool is_long) : state_(is_long ? PyEval_SaveThread() : nullptr) {}
  ~WithoutTheLock() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutTheLock(const WithoutTheLock&) = delete;
  WithoutTheLock& operator=(const WithoutTheLock&) = delete;

 private:
  PyThreadState* state_;
};

void hash(const Tokens& tokens, uint32_t block_size, const uint8_t* parent, const Extras& extras, uint8_t* out) {
  const size_t count = tokens.size() / block_size;
  const WithoutTheLock unlocked(count > kLong);
  BlockMessages(block_size).names(parent, tokens.data(), count, extras.data(), out);
}

constexpr const char* kHashWords[] = {"token_ids", "block_size", "parent", "extras"};
constexpr const char* kIntoWords[] = {"token_ids", "block_size", "parent", "out", "extras"};

PyObject* hash_blocks(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments<4> arguments(kHashWords, 3, 4, given, count, keywords);
    const uint32_t block_size = block_size_of(arguments.at[1]);
    const uint8_t* parent = parent_of(arguments.at[2]);
    const Tokens tokens(arguments.at[0]);
    if (!tokens.fit()) return none();
    const size_t num_blocks = tokens.size() / block_size;
    const Extras extras(arguments.at[3], num_blocks);
    std::vector<uint8_t> names(32 * num_blocks);
    hash(tokens, block_size, parent, extras, names.data());
    Ref list = Ref::made(PyList_New(num_blocks));
    for (size_t i = 0; i < num_blocks; i++) {
      const char* name = reinterpret_cast<const char*>(&names[32 * i]);
      PyList_SetItem(list.get(), i, Ref::made(PyBytes_FromStringAndSize(name, 32)).release());
    }
    return list.release();
  });
}

PyObject* hash_into(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments<5> arguments(kIntoWords, 4, 5, given, count, keywords);
    const uint32_t block_size = block_size_of(arguments.at[1]);
    const uint8_t* parent = parent_of(arguments.at[2]);
    const Tokens tokens(arguments.at[0]);
    if (!tokens.fit()) return none();
    const size_t num_blocks = tokens.size() / block_size;
    const Extras extras(arguments.at[4], num_blocks);
    Buffer out;
    out.open(arguments.at[3], true);
    if (out.item() != 1) raise(PyExc_TypeError, "names are written to bytes, 32 for each");
    if (out.length() / 32 < num_blocks)
      raise(PyExc_ValueError, "%zd names do not fit into %zd bytes", num_blocks, out.length());
    hash(tokens, block_size, parent, extras, out.data<uint8_t>());
    return PyLong_FromSize_t(num_blocks);
  });
}

constexpr const char* kNameWords[] = {"encoded", "block_size", "parent", "extra"};

PyObject* hash_encoded(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments<4> arguments(kNameWords, 3, 4, given, count, keywords);
    const Encoded tokens = bytes_of(arguments.at[0], "encoded tokens");
    const uint8_t* parent = parent_of(arguments.at[2]);
    const bool has_extra = arguments.at[3] && arguments.at[3] != Py_None;
    const Encoded extra = has_extra ? bytes_of(arguments.at[3], "encoded extra keys") : Encoded{};
    uint8_t name[32];
    BlockMessages(block_size_of(arguments.at[1])).name(parent, tokens, extra, name);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(name), 32);
  });
}

PyObject* encode_blocks(PyObject*, PyObject* blocks) {
  return guarded([&]() -> PyObject* {
    if (!is_row_of_bytes(blocks)) raise(PyExc_TypeError, "blocks are an array of int32 or int64 with two axes");
    const Tokens tokens(blocks, 2);
    if (!tokens.fit()) return none();
    const Py_ssize_t num_blocks = PyObject_Size(blocks);
    if (num_blocks < 0) throw Raised{};
    const size_t block_size = num_blocks ? tokens.size() / num_blocks : 0;
    Ref list = Ref::made(PyList_New(num_blocks));
    std::vector<uint8_t> encoded(kMostOfToken * block_size + kSlack);
    for (Py_ssize_t i = 0; i < num_blocks; i++) {
      const uint8_t* end = put_tokens(encoded.data(), tokens.data() + i * block_size, block_size);
      const char* start = reinterpret_cast<const char*>(encoded.data());
      Ref item = Ref::made(PyBytes_FromStringAndSize(start, end - encoded.data()));
      PyList_SetItem(list.get(), i, item.release());
    }
    return list.release();
  });
}

PyObject* compressions(PyObject*, PyObject* given) {
  return guarded([&]() -> PyObject* {
    const long long count = integer(given);
    State state{};
    const uint8_t piece[64] = {};
    const uint8_t* pieces = piece;
    for (long long i = 0; i < count; i++) sha().one(&state, &pieces, 1);
    return PyLong_FromUnsignedLong(state.words[0]);
  });
}

constexpr const char* kFollowWords[] = {"lines", "heads", "steps"};

PyObject* follow(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments<3> arguments(kFollowWords, 3, 3, given, count, keywords);
    Buffer lines;
    lines.open(arguments.at[0]);
    if (!lines.has_integers() || lines.item() != 4 || !lines.is_aligned()) raise(PyExc_TypeError, "lines are an array of int32");
    const IdRoom heads(arguments.at[1]);
    const long long steps = integer(arguments.at[2]);
    const uint32_t* line = lines.data<uint32_t>();
    int32_t* head = heads.data();
    const size_t num_lines = lines.length() / 64, num_heads = heads.size();
    for (long long step = 0; step < steps; step++) {
      for (size_t i = 0; i < num_heads; i++) {
        const uint32_t at = head[i];
        if (at >= num_lines) raise(PyExc_IndexError, "there is no line %zd", static_cast<Py_ssize_t>(head[i]));
        head[i] = line[16 * size_t{at}];
      }
    }
    return none();
  });
}

PyObject* features(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s}", "sha256", sha().name);
}

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMethodDef hashing_functions[] = {
    {"hash_blocks", as_method(hash_blocks), METH_FASTCALL | METH_KEYWORDS,
     "The names of the full blocks, each 32 bytes; None where a token id is no number from 0 to 2**32 - 1."},
    {"hash_into", as_method(hash_into), METH_FASTCALL | METH_KEYWORDS,
     "The same, written to `out` one behind the other; how many there are."},
    {"hash_encoded", as_method(hash_encoded), METH_FASTCALL | METH_KEYWORDS,
     "The name of one block whose tokens are encoded already."},
    {"encode_blocks", encode_blocks, METH_O, "The encoded tokens of each row; None where a token id does not fit."},
    {"compressions", compressions, METH_O, "So many SHA-256 compressions one after the other, for benchmarks."},
    {"follow", as_method(follow), METH_FASTCALL | METH_KEYWORDS,
     "Each head goes on to the line that its line begins with, `steps` times, for benchmarks."},
    {"features", features, METH_NOARGS, "What of the processor is used."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace kvpool
