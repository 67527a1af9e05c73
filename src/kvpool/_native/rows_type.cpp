// The Python type around the rows of a decode batch.
#include "rows_type.hpp"

namespace kvpool {

namespace {

uint32_t small(PyObject* given, const char* what, long long least = 0) {
  const long long value = integer(given);
  if (value < least || value > INT32_MAX) raise(PyExc_ValueError, "%s is %lld: %lld to %d", what, value, least, INT32_MAX);
  return static_cast<uint32_t>(value);
}

unsigned group_at(PyObject* given, size_t num_groups) {
  const long long group = integer(given);
  if (group < 0 || static_cast<size_t>(group) >= num_groups)
    raise(PyExc_IndexError, "there is no group %lld: %zd share the pool", group, static_cast<Py_ssize_t>(num_groups));
  return static_cast<unsigned>(group);
}

// [(window, num_sink_blocks, [group ids])]
void read_windows(PyObject* given, Layout& layout) {
  const Items windows(given);
  for (size_t i = 0; i < windows.size(); i++) {
    const Ref kept = Ref::borrowed(windows[i]);
    const Items parts(kept.get());
    layout.windows.push_back({integer(parts[0]), small(parts[1], "num_sink_blocks")});
    if (layout.windows.back().num_tokens < 1) raise(PyExc_ValueError, "a window has at least 1 token");
    const Items groups(parts[2]);
    for (size_t k = 0; k < groups.size(); k++)
      layout.window_of[group_at(groups[k], layout.window_of.size())] = static_cast<unsigned>(i);
  }
  if (layout.windows.size() > kMostGroups) raise(PyExc_ValueError, "more windows than groups");
}

// [(group, is_spare)]
void read_published(PyObject* given, const Pool& pool, Layout& layout) {
  const Items published(given);
  for (size_t i = 0; i < published.size(); i++) {
    const Ref kept = Ref::borrowed(published[i]);
    const Items parts(kept.get());
    const int is_spare = PyObject_IsTrue(parts[1]);
    if (is_spare < 0) throw Raised{};
    if (is_spare && !pool.is_ranked()) raise(PyExc_ValueError, "spare blocks need a pool with ranks");
    layout.published.push_back({group_at(parts[0], layout.window_of.size()), is_spare != 0});
  }
}

// [n % block_size of lengths n after which a row may let go of blocks]
void read_remainders(PyObject* given, Layout& layout) {
  layout.lets_go_after.assign(size_t{layout.block_size} + 1, 0);
  const Items remainders(given);
  for (size_t i = 0; i < remainders.size(); i++) {
    const uint32_t remainder = small(remainders[i], "a remainder");
    if (remainder >= layout.block_size) raise(PyExc_ValueError, "%u remains of no block of %u", remainder, layout.block_size);
    layout.lets_go_after[remainder] = 1;
  }
}

constexpr const char* kWords[] = {"pool", "block_size", "keeps_last_border", "windows", "published", "remainders",
                                  "on_stored", "on_named"};

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (keywords && PyDict_Size(keywords)) raise(PyExc_TypeError, "no arguments by keyword are taken");
    constexpr Py_ssize_t count = sizeof kWords / sizeof kWords[0];
    if (PyTuple_Size(arguments) != count)
      raise(PyExc_TypeError, "%zd arguments are needed, %zd are given", count, PyTuple_Size(arguments));
    PyObject* given[count];
    for (Py_ssize_t i = 0; i < count; i++) given[i] = PyTuple_GetItem(arguments, i);
    const int is_pool = PyObject_IsInstance(given[0], pool_type);
    if (is_pool < 0) throw Raised{};
    if (!is_pool) raise(PyExc_TypeError, "%s is a native pool, not %R", kWords[0], given[0]);
    Pool& pool = pool_of(given[0]);
    Layout layout;
    layout.block_size = small(given[1], kWords[1], 1);
    if (layout.block_size > 1 << 20) raise(PyExc_ValueError, "a block of %u tokens is too large", layout.block_size);
    const int keeps_last_border = PyObject_IsTrue(given[2]);
    if (keeps_last_border < 0) throw Raised{};
    layout.keeps_last_border = keeps_last_border;
    layout.window_of.assign(pool.num_groups(), kKeepsAll);
    read_windows(given[3], layout);
    read_published(given[4], pool, layout);
    read_remainders(given[5], layout);
    auto rows = std::make_unique<Rows>(pool, std::move(layout));
    auto members = std::make_unique<std::vector<Member>>();
    Ref requests = Ref::made(PyList_New(0));
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Ref self = Ref::made(allocate(type, 0));
    RowsObject& object = rows_object_of(self.get());
    object.rows = rows.release();
    object.members = members.release();
    object.requests = requests.release();
    object.pool = Ref::borrowed(given[0]).release();
    object.on_stored = is_given(given[6]) ? Ref::borrowed(given[6]).release() : nullptr;
    object.on_named = is_given(given[7]) ? Ref::borrowed(given[7]).release() : nullptr;
    return self.release();
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const RowsObject& object = rows_object_of(self);
  Py_VISIT(Py_TYPE(self));
  for (PyObject* one : {object.requests, object.pool, object.on_stored, object.on_named}) Py_VISIT(one);
  if (!object.members) return 0;
  for (const Member& member : *object.members)
    for (const Ref* one : {&member.request, &member.table, &member.tokens, &member.block_ids}) Py_VISIT(one->get());
  return 0;
}

// The pool stays: the rows have a reference to it.
int clear(PyObject* self) {
  RowsObject& object = rows_object_of(self);
  std::vector<Member> gone;
  if (object.members) object.members->swap(gone);
  if (object.rows) object.rows->remove(std::vector<uint8_t>(object.rows->size(), 1));
  object.num_eager = 0;
  Py_CLEAR(object.on_stored);
  Py_CLEAR(object.on_named);
  return 0;
}

void unmake(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  RowsObject& object = rows_object_of(self);
  PyTypeObject* type = Py_TYPE(self);
  delete object.rows;
  delete object.members;
  delete object.outcome;
  Py_XDECREF(object.requests);
  Py_XDECREF(object.pool);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

}  // namespace

PyObject* make_rows_type() {
  make_words();
  static std::vector<PyMethodDef> verbs;
  if (verbs.empty()) {
    verbs.insert(verbs.end(), rows_members_verbs, rows_members_verbs + num_rows_members_verbs);
    verbs.insert(verbs.end(), rows_steps_verbs, rows_steps_verbs + num_rows_steps_verbs);
    verbs.insert(verbs.end(), rows_reading_verbs, rows_reading_verbs + num_rows_reading_verbs);
    verbs.push_back({nullptr, nullptr, 0, nullptr});
  }
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(unmake)},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear)},
                         {Py_tp_methods, verbs.data()},
                         {0, nullptr}};
  PyType_Spec spec = {"kvpool._native._core.Rows", sizeof(RowsObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                      slots};
  return PyType_FromSpec(&spec);
}

}  // namespace kvpool
