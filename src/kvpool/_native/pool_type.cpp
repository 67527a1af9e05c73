// The Python type around a pool.
#include "pool_type.hpp"

#include <algorithm>

namespace kvpool {

namespace {

// (num_blocks, num_groups, is_ranked, on_removed, lineages); the class in pool.py has the usual arguments.
PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    long long num_blocks, num_groups;
    int is_ranked;
    PyObject *on_removed, *lineages;
    if (!PyArg_ParseTuple(arguments, "LLpOO!", &num_blocks, &num_groups, &is_ranked, &on_removed, &PyDict_Type,
                          &lineages))
      throw Raised{};
    if (num_blocks < 2 || num_blocks > INT32_MAX || num_groups < 1 || num_groups > 256)
      raise(config_error, "a pool has 2 to %d blocks and 1 to 256 groups, not %lld and %lld", INT32_MAX, num_blocks,
            num_groups);
    auto pool = std::make_unique<Pool>(static_cast<uint32_t>(num_blocks), static_cast<unsigned>(num_groups), is_ranked);
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Ref self = Ref::made(allocate(type, 0));
    PoolObject& object = object_of(self.get());
    object.pool = pool.release();
    object.on_removed = is_given(on_removed) ? Ref::borrowed(on_removed).release() : nullptr;
    object.lineages = Ref::borrowed(lineages).release();
    return self.release();
  });
}

void unmake(PyObject* self) {
  PoolObject& object = object_of(self);
  PyTypeObject* type = Py_TYPE(self);
  delete object.pool;
  Py_XDECREF(object.on_removed);
  Py_XDECREF(object.lineages);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

template <long long (*value)(const Pool&)>
PyObject* number(PyObject* self, void*) {
  return PyLong_FromLongLong(value(pool_of(self)));
}

long long num_blocks(const Pool& pool) { return pool.num_blocks(); }
long long num_usable(const Pool& pool) { return pool.num_blocks() - 1; }
long long num_free(const Pool& pool) { return pool.num_free(); }
long long num_cached(const Pool& pool) { return pool.num_cached(); }
long long num_evictions(const Pool& pool) { return static_cast<long long>(pool.num_evictions()); }
long long num_bytes(const Pool& pool) { return static_cast<long long>(pool.bytes()); }

PyGetSetDef numbers[] = {{"num_blocks", number<num_blocks>, nullptr, nullptr, nullptr},
                         {"num_usable", number<num_usable>, nullptr, nullptr, nullptr},
                         {"num_free", number<num_free>, nullptr, nullptr, nullptr},
                         {"num_cached", number<num_cached>, nullptr, nullptr, nullptr},
                         {"num_evictions", number<num_evictions>, nullptr, nullptr, nullptr},
                         {"num_bytes", number<num_bytes>, nullptr, nullptr, nullptr},
                         {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyObject* make_pool_type() {
  // All verbs in one list that lives as long as the type.
  static std::vector<PyMethodDef> verbs;
  if (verbs.empty()) {
    verbs.insert(verbs.end(), reading_verbs, reading_verbs + num_reading_verbs);
    verbs.insert(verbs.end(), changing_verbs, changing_verbs + num_changing_verbs);
    verbs.push_back({nullptr, nullptr, 0, nullptr});
  }
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(unmake)},
                         {Py_tp_methods, verbs.data()},
                         {Py_tp_getset, numbers},
                         {0, nullptr}};
  PyType_Spec spec = {"kvpool._native._core.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                      slots};
  return PyType_FromSpec(&spec);
}

}  // namespace kvpool
