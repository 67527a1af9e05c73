// The module kvpool._native._core.
#include "binding.hpp"
#include "view.hpp"

#ifndef KVPOOL_SOURCES
#define KVPOOL_SOURCES ""  // not told
#endif

namespace kvpool {

PyObject* usage_error = nullptr;
PyObject* config_error = nullptr;
PyObject* block_stored = nullptr;
PyObject* pool_type = nullptr;

namespace {

int fill(PyObject* module) {
  PyObject* filled = guarded([&]() -> PyObject* {
    const Ref errors = Ref::made(PyImport_ImportModule("kvpool.errors"));
    usage_error = Ref::made(PyObject_GetAttrString(errors.get(), "UsageError")).release();
    config_error = Ref::made(PyObject_GetAttrString(errors.get(), "ConfigError")).release();
    const Ref events = Ref::made(PyImport_ImportModule("kvpool.events"));
    block_stored = Ref::made(PyObject_GetAttrString(events.get(), "BlockStored")).release();
    pool_type = Ref::made(make_pool_type()).release();
    if (PyModule_AddObjectRef(module, "Pool", pool_type) < 0) throw Raised{};
    view_type = Ref::made(make_view_type()).release();
    if (PyModule_AddObjectRef(module, "View", view_type) < 0) throw Raised{};
    const Ref rows = Ref::made(make_rows_type());
    if (PyModule_AddObjectRef(module, "Rows", rows.get()) < 0) throw Raised{};
    if (PyModule_AddStringConstant(module, "SOURCES", KVPOOL_SOURCES) < 0) throw Raised{};
    return none();
  });
  Py_XDECREF(filled);
  return filled ? 0 : -1;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "The native core.", 0, hashing_functions, slots, nullptr,
                          nullptr, nullptr};

}  // namespace

}  // namespace kvpool

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&kvpool::definition); }
