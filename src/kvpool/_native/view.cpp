// The Python type of arrays over memory of the core. Read-only.
#include "view.hpp"

namespace kvpool {

PyObject* view_type = nullptr;

namespace {

struct ViewObject {
  PyObject_HEAD
  std::shared_ptr<void>* keeper;
  const void* start;
  Shape shape;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  ViewObject& object = *reinterpret_cast<ViewObject*>(self);
  view->obj = nullptr;
  if (flags & PyBUF_WRITABLE || (flags & PyBUF_STRIDES) != PyBUF_STRIDES) {
    PyErr_SetString(PyExc_BufferError, "it can only be read, and by who can take steps: numpy.asarray does");
    return -1;
  }
  const Shape& shape = object.shape;
  view->buf = const_cast<void*>(object.start);
  view->len = shape.item * shape.counts[0] * (shape.num_axes == 2 ? shape.counts[1] : 1);
  view->readonly = 1;
  view->itemsize = shape.item;
  view->format = flags & PyBUF_FORMAT ? const_cast<char*>(shape.format) : nullptr;
  view->ndim = shape.num_axes;
  view->shape = object.shape.counts;
  view->strides = object.shape.steps;
  view->suboffsets = nullptr;
  view->internal = nullptr;
  Py_INCREF(self);
  view->obj = self;
  return 0;
}

void unmake(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<ViewObject*>(self)->keeper;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

}  // namespace

PyObject* make_view_type() {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(unmake)},
                                {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                {0, nullptr}};
  static PyType_Spec spec = {"kvpool._native._core.View", sizeof(ViewObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return PyType_FromSpec(&spec);
}

PyObject* view_of(std::shared_ptr<void> keeper, const void* start, const Shape& shape) {
  auto kept = std::make_unique<std::shared_ptr<void>>(std::move(keeper));
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(view_type);
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  Ref self = Ref::made(allocate(type, 0));
  ViewObject& object = *reinterpret_cast<ViewObject*>(self.get());
  object.keeper = kept.release();
  object.start = start;
  object.shape = shape;
  return self.release();
}

}  // namespace kvpool
