// Arrays that Python reads without a copy.
#pragma once
#include <memory>

#include "binding.hpp"

namespace kvpool {

extern PyObject* view_type;

// One or two axes over memory that is kept as long as anybody looks at it. `format` as in Python's struct.
struct Shape {
  const char* format;
  Py_ssize_t item;
  int num_axes;
  Py_ssize_t counts[2];
  Py_ssize_t steps[2];  // in bytes
};

PyObject* make_view_type();
PyObject* view_of(std::shared_ptr<void> keeper, const void* start, const Shape& shape);

// Two axes of values of its own.
template <class T>
PyObject* view_of_own(std::vector<T> values, const char* format, Py_ssize_t num_rows, Py_ssize_t width) {
  auto kept = std::make_shared<std::vector<T>>(std::move(values));
  constexpr Py_ssize_t item = sizeof(T);
  return view_of(kept, kept->data(), {format, item, 2, {num_rows, width}, {item * width, item}});
}

}  // namespace kvpool
