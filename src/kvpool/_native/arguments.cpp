// What comes in from Python, and what goes out.
#include "binding.hpp"

namespace kvpool {

namespace {

// What a conversion may run must not take the item away.
long long integer_of_item(PyObject* item) {
  if (PyLong_CheckExact(item)) return integer(item);
  const Ref kept = Ref::borrowed(item);
  return integer(item);
}

bool read_integer(PyObject* given, Name& name) {
  int is_too_large = 0;
  const long long value = PyLong_AsLongLongAndOverflow(given, &is_too_large);
  if (value == -1 && PyErr_Occurred()) throw Raised{};
  unsigned long long large = static_cast<unsigned long long>(value);
  if (is_too_large < 0) return false;
  if (is_too_large > 0) {
    large = PyLong_AsUnsignedLongLong(given);
    if (large == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
  }
  mark(name, !is_too_large && value < 0 ? kNegative : kUnsigned, &large, 8);
  return true;
}

bool read_bytes(PyObject* given, Name& name) {
  const char* bytes = PyBytes_AsString(given);
  const size_t length = PyBytes_Size(given);
  if (length == 32) {
    std::memcpy(name.bytes, bytes, 32);
    return true;
  }
  if (length > kMostOfShort) return false;
  mark(name, static_cast<uint8_t>(length), bytes, length);
  return true;
}

}  // namespace

long long integer(PyObject* given) {
  const long long value = PyLong_AsLongLong(given);
  if (value == -1 && PyErr_Occurred()) throw Raised{};
  return value;
}

bool read_name(PyObject* given, Name& name) {
  if (PyBytes_Check(given)) return read_bytes(given, name);
  if (PyLong_Check(given)) return read_integer(given, name);
  if (!PyIndex_Check(given)) return false;
  const Ref kept = Ref::borrowed(given), number = Ref::made(PyNumber_Index(given));
  return read_integer(number.get(), name);
}

Name name_of(PyObject* given) {
  const Ref kept = Ref::borrowed(given);
  Name name;
  if (!read_name(given, name))
    raise(usage_error, "%R is no name of a block: 32 bytes, at most %zd, or a whole number of 64 bits", given,
          static_cast<Py_ssize_t>(kMostOfShort));
  return name;
}

PyObject* to_python(const Name& name) {
  const char* bytes = reinterpret_cast<const char*>(name.bytes);
  if (!is_marked(name)) return PyBytes_FromStringAndSize(bytes, 32);
  const uint8_t kind = name.bytes[11];
  if (kind <= kMostOfShort) return PyBytes_FromStringAndSize(bytes + 12, kind);
  long long value;
  std::memcpy(&value, bytes + 12, 8);
  return kind == kNegative ? PyLong_FromLongLong(value) : PyLong_FromUnsignedLongLong(value);
}

bool is_row_of_bytes(PyObject* given) {
  return !PyList_Check(given) && !PyTuple_Check(given) && PyObject_CheckBuffer(given);
}

IdList::IdList(PyObject* given) {
  if (is_row_of_bytes(given)) {
    buffer_.open(given);
    if (!buffer_.has_integers() || buffer_.num_axes() != 1)
      raise(PyExc_TypeError, "block ids are a list, or one row of int32 or int64");
    const size_t count = buffer_.length() / buffer_.item();
    if (buffer_.item() == 4 && buffer_.is_aligned()) {
      ids_ = {buffer_.data<int32_t>(), count};
      return;
    }
    own_.resize(count);
    const char* from = buffer_.data<char>();
    if (buffer_.item() == 4 && count) std::memcpy(own_.data(), from, buffer_.length());
    for (size_t i = 0; buffer_.item() == 8 && i < count; i++) {
      int64_t id;
      std::memcpy(&id, from + 8 * i, 8);
      if (id != static_cast<int32_t>(id)) throw NoSuchBlock{id};
      own_[i] = static_cast<int32_t>(id);
    }
  } else {
    const Items items(given);
    own_.reserve(items.size());
    for (size_t i = 0; i < items.size(); i++) {
      const long long id = integer_of_item(items[i]);
      if (id != static_cast<int32_t>(id)) throw NoSuchBlock{id};
      own_.push_back(static_cast<int32_t>(id));
    }
  }
  ids_ = {own_.data(), own_.size()};
}

IdRoom::IdRoom(PyObject* given) {
  buffer_.open(given, true);
  if (!buffer_.has_integers() || buffer_.item() != 4 || buffer_.num_axes() != 1 || !buffer_.is_aligned())
    raise(PyExc_TypeError, "block ids are written to one row of int32");
}

NameList::NameList(PyObject* given) {
  if (is_row_of_bytes(given)) {
    buffer_.open(given);
    if (buffer_.item() != 1) raise(PyExc_TypeError, "names are a list, or one row of bytes, 32 for each");
    if (buffer_.length() % 32)
      raise(PyExc_ValueError, "names have 32 bytes each: %zd are not so many", buffer_.length());
    names_ = {buffer_.data<Name>(), buffer_.length() / 32};
    return;
  }
  const Items items(given);
  own_.reserve(items.size());
  for (size_t i = 0; i < items.size(); i++) own_.push_back(name_of(items[i]));
  names_ = {own_.data(), own_.size()};
}

PyObject* list_of(const std::vector<int32_t> ids) {
  Ref list = Ref::made(PyList_New(ids.size()));
  for (size_t i = 0; i < ids.size(); i++) {
    Ref id = Ref::made(PyLong_FromLong(ids[i]));
    PyList_SetItem(list.get(), i, id.release());
  }
  return list.release();
}

}  // namespace kvpool
