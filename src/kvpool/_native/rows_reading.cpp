// The verbs of rows that change nothing.
#include "rows_type.hpp"

namespace kvpool {

void require_count(Py_ssize_t count, Py_ssize_t wanted) {
  if (count != wanted) raise(PyExc_TypeError, "%zd arguments are needed, %zd are given", wanted, count);
}

namespace {

// Their place, where `wanted`.
template <class Wanted>
PyObject* rows_where(const Rows& rows, Wanted wanted) {
  std::vector<int32_t> found;
  for (size_t at = 0; at < rows.size(); at++)
    if (wanted(at)) found.push_back(static_cast<int32_t>(at));
  return list_of(found);
}

PyObject* ending_rows(PyObject* self, PyObject*) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    return rows_where(rows, [&](size_t at) { return rows.length(at) >= rows[at].limit - 1; });
  });
}

PyObject* unserved(PyObject* self, PyObject*) {
  return guarded([&] {
    const std::vector<uint32_t>& rows = rows_of(self).unserved();
    return list_of({rows.begin(), rows.end()});
  });
}

// A list that stays as it is when requests leave.
PyObject* requests(PyObject* self, PyObject*) {
  PyObject* all = rows_object_of(self).requests;
  Py_INCREF(all);
  return all;
}

// (row). Its request and its table.
PyObject* member(PyObject* self, PyObject* given) {
  return guarded([&] {
    const long long at = integer(given);
    const RowsObject& object = rows_object_of(self);
    if (at < 0 || static_cast<size_t>(at) >= object.members->size())
      raise(PyExc_IndexError, "there is no row %lld: the batch has %zd", at,
            static_cast<Py_ssize_t>(object.members->size()));
    const Member& found = (*object.members)[at];
    const Ref request = Ref::borrowed(found.request.get()), table = Ref::borrowed(found.table.get());
    return Py_BuildValue("(OO)", request.get(), table.get());
  });
}

PyObject* last_tokens(PyObject* self, PyObject*) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    std::vector<int64_t> tokens(rows.size());
    for (size_t at = 0; at < tokens.size(); at++)
      if (!rows.recent(at).empty()) tokens[at] = rows.recent(at).back();
    const size_t count = tokens.size();
    return view_of_own(std::move(tokens), "q", 1, count);
  });
}

PyObject* lengths(PyObject* self, PyObject*) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    const Shape shape{"q", 8, 1, {static_cast<Py_ssize_t>(rows.size()), 0}, {8, 0}};
    return view_of(rows.lengths().keeper(), rows.lengths().data(), shape);
  });
}

PyObject* block_tables(PyObject* self, PyObject* given) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    const long long group = integer(given);
    if (group < 0 || group >= rows.layout().num_groups())
      raise(PyExc_IndexError, "there is no group %lld: the cache has %u", group, rows.layout().num_groups());
    const BlockMatrix& blocks = rows.blocks();
    const Py_ssize_t count = rows.size(), columns = rows.num_columns(), stride = 4 * blocks.columns();
    return view_of(blocks.keeper(), blocks.row(static_cast<unsigned>(group), 0), {"i", 4, 2, {count, columns}, {stride, 4}});
  });
}

PyObject* slot_mapping(PyObject* self, PyObject*) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    std::vector<int64_t> slots(rows.size() * rows.layout().num_groups());
    rows.slots(slots.data());
    return view_of_own(std::move(slots), "q", rows.layout().num_groups(), rows.size());
  });
}

}  // namespace

PyMethodDef rows_reading_verbs[] = {{"ending_rows", ending_rows, METH_NOARGS, nullptr},
                                    {"unserved", unserved, METH_NOARGS, nullptr},
                                    {"requests", requests, METH_NOARGS, nullptr},
                                    {"member", member, METH_O, nullptr},
                                    {"last_tokens", last_tokens, METH_NOARGS, nullptr},
                                    {"lengths", lengths, METH_NOARGS, nullptr},
                                    {"block_tables", block_tables, METH_O, nullptr},
                                    {"slot_mapping", slot_mapping, METH_NOARGS, nullptr}};
const size_t num_rows_reading_verbs = sizeof rows_reading_verbs / sizeof rows_reading_verbs[0];

}  // namespace kvpool
