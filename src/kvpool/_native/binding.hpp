// What all parts of the binding share: owned references, buffers, errors. CPython's limited API only.
#pragma once
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pool.hpp"

namespace kvpool {

// A Python error is set.
struct Raised {};

// kvpool.errors.UsageError, kvpool.errors.ConfigError, kvpool.events.BlockStored.
extern PyObject* usage_error;
extern PyObject* config_error;
extern PyObject* block_stored;
extern PyObject* pool_type;

template <class... Values>
[[noreturn]] void raise(PyObject* error, const char* format, Values... values) {
  PyErr_Format(error, format, values...);
  throw Raised{};
}

// A reference that is given back.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}  // nullptr: an error is set
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  static Ref made(PyObject* owned) {
    if (!owned) throw Raised{};
    return Ref(owned);
  }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// A C-contiguous buffer, given back at the end.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (is_open_) PyBuffer_Release(&view_);
  }

  void open(PyObject* object, bool is_written = false) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_ND | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0)) < 0)
      throw Raised{};
    is_open_ = true;
  }

  template <class T>
  T* data() const {
    return static_cast<T*>(view_.buf);
  }
  size_t length() const { return view_.len; }
  size_t item() const { return view_.itemsize; }
  int num_axes() const { return view_.ndim; }
  bool is_aligned() const { return reinterpret_cast<uintptr_t>(view_.buf) % item() == 0; }
  // Signed whole numbers in the machine's byte order.
  bool has_integers() const {
    const char* format = view_.format;
    if (!format) return false;
    if (*format == '@' || *format == '=' || *format == '<') format++;
    return (*format == 'i' || *format == 'l' || *format == 'q') && !format[1] && (item() == 4 || item() == 8);
  }

 private:
  Py_buffer view_;
  bool is_open_ = false;
};

// Run `body`, whose C++ exceptions become Python's.
template <class Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body();
  } catch (const Raised&) {
  } catch (const NoSuchBlock& error) {
    PyErr_Format(PyExc_IndexError, "there is no block %lld in the pool", static_cast<long long>(error.id));
  } catch (const Refused& error) {
    PyErr_SetString(usage_error, error.what());
  } catch (const Broken& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::length_error&) {
    PyErr_NoMemory();
  } catch (...) {
    PyErr_SetString(PyExc_SystemError, "an unknown error in the native core");
  }
  return nullptr;
}

inline PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Positional and keyword arguments of a call, by the order of `words`; nullptr where one is not given.
template <size_t count>
struct Arguments {
  PyObject* at[count] = {};

  Arguments(const char* const (&words)[count], size_t num_needed, size_t num_positional, PyObject* const* given,
            Py_ssize_t num_given, PyObject* keywords) {
    if (static_cast<size_t>(num_given) > num_positional)
      raise(PyExc_TypeError, "at most %zd arguments without a keyword, %zd are given",
            static_cast<Py_ssize_t>(num_positional), num_given);
    for (Py_ssize_t i = 0; i < num_given; i++) at[i] = given[i];
    for (Py_ssize_t i = 0; keywords && i < PyTuple_Size(keywords); i++)
      at[place_of(PyTuple_GetItem(keywords, i), words)] = given[num_given + i];
    for (size_t i = 0; i < num_needed; i++)
      if (!at[i]) raise(PyExc_TypeError, "argument '%s' is missing", words[i]);
  }

 private:
  size_t place_of(PyObject* word, const char* const (&words)[count]) const {
    for (size_t i = 0; i < count; i++) {
      if (PyUnicode_CompareWithASCIIString(word, words[i]) != 0) continue;
      if (at[i]) raise(PyExc_TypeError, "argument '%s' is given twice", words[i]);
      return i;
    }
    raise(PyExc_TypeError, "there is no argument %R", word);
  }
};

// The items of a list, a tuple, or whatever can be iterated; none of them is there longer than until the next is read.
class Items {
 public:
  explicit Items(PyObject* given) : list_(as_list(given)), is_list_(PyList_Check(list_.get())) {}

  size_t size() const { return is_list_ ? PyList_Size(list_.get()) : PyTuple_Size(list_.get()); }

  // Borrowed. Raises when the list has become shorter in the meantime.
  PyObject* operator[](size_t at) const {
    PyObject* item = is_list_ ? PyList_GetItem(list_.get(), at) : PyTuple_GetItem(list_.get(), at);
    if (!item) throw Raised{};
    return item;
  }

 private:
  static Ref as_list(PyObject* given) {
    return PyList_Check(given) || PyTuple_Check(given) ? Ref::borrowed(given) : Ref::made(PySequence_List(given));
  }

  Ref list_;
  bool is_list_;
};

// A whole number that fits, from anything that is one.
long long integer(PyObject* given);

// Block ids out of a list, an iterable, or an array of int32 or int64.
class IdList {
 public:
  explicit IdList(PyObject* given);
  Ids get() const { return ids_; }

 private:
  Buffer buffer_;
  std::vector<int32_t> own_;
  Ids ids_;
};

// An array of int32 that results are written to.
class IdRoom {
 public:
  explicit IdRoom(PyObject* given);
  int32_t* data() const { return buffer_.data<int32_t>(); }
  size_t size() const { return buffer_.length() / 4; }

 private:
  Buffer buffer_;
};

// One name: 32 bytes, at most 20, or a whole number of 64 bits. False for what is none; UsageError.
bool read_name(PyObject* given, Name& name);
Name name_of(PyObject* given);
PyObject* to_python(const Name& name);

// Names out of a list, an iterable, or 32 bytes each in a row.
class NameList {
 public:
  explicit NameList(PyObject* given);
  Names get() const { return names_; }

 private:
  Buffer buffer_;
  std::vector<Name> own_;
  Names names_;
};

// Whether these are names in one row of bytes.
bool is_row_of_bytes(PyObject* given);

// A list of ids of one's own: the garbage collector may run first, and whatever it calls.
PyObject* list_of(const std::vector<int32_t> ids);

PyObject* make_pool_type();
PyObject* make_rows_type();
extern PyMethodDef hashing_functions[];

}  // namespace kvpool
