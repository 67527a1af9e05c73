// The verbs of rows about who has one, and what requests and tables know of it.
#include <algorithm>

#include "row_tokens.hpp"
#include "rows_type.hpp"

namespace kvpool {

namespace {

// A row as it is told from outside. All of it is read before rows are looked at: to read a number may run anything.
struct Newcomer {
  Member member;
  long long limit = INT64_MAX;
  std::vector<std::vector<int32_t>> tables;
  std::vector<uint32_t> first_held;
};

Tail tail_of(PyObject* tokens, PyObject* parent, PyObject* extra, PyObject* plain_from, uint32_t block_size) {
  Tail tail;
  tail.plain_from = integer(plain_from);
  tail.parent = name_of(parent);
  tail.has_extra = extra != Py_None;
  if (tail.has_extra) {
    if (!PyBytes_Check(extra)) raise(PyExc_TypeError, "encoded extra keys are bytes, not %R", extra);
    tail.extra.assign(PyBytes_AsString(extra), PyBytes_Size(extra));
  }
  const RowTokens given(tokens);
  if (!given.fit()) raise(PyExc_ValueError, "these are no token ids: %R", tokens);
  if (given.size() > block_size)
    raise(PyExc_ValueError, "%zd tokens do not reach the last committed block", static_cast<Py_ssize_t>(given.size()));
  tail.tokens.reserve(block_size);
  tail.tokens.assign(given.data(), given.data() + given.size());
  return tail;
}

void require_tail(const Tail& tail, int64_t length, uint32_t block_size) {
  const int64_t count = tail.tokens.size();
  if (count > length || (length - count) % block_size)
    raise(PyExc_ValueError, "%zd tokens do not reach the last committed block", static_cast<Py_ssize_t>(count));
}

Newcomer newcomer_of(PyObject* const* given) {
  Newcomer row;
  row.member.request = Ref::borrowed(given[0]);
  row.member.table = Ref::borrowed(given[1]);
  if (given[2] != Py_None) row.member.late_name = Ref::borrowed(given[2]);
  if (!PyList_Check(given[3])) raise(PyExc_TypeError, "the tokens of a request are a list, not %R", given[3]);
  row.member.tokens = Ref::borrowed(given[3]);
  if (!PyList_Check(given[4])) raise(PyExc_TypeError, "block ids are a list of lists, not %R", given[4]);
  row.member.block_ids = Ref::borrowed(given[4]);
  for (Py_ssize_t group = 0; group < PyList_Size(given[4]); group++) {
    const Ref table = Ref::borrowed(PyList_GetItem(given[4], group));
    if (!PyList_Check(table.get())) raise(PyExc_TypeError, "block ids are a list of lists, not %R", given[4]);
    const IdList ids(table.get());
    row.tables.emplace_back(ids.get().begin(), ids.get().end());
  }
  const IdList held(given[5]);
  row.first_held.assign(held.get().begin(), held.get().end());
  row.member.num_computed = integer(given[6]);
  if (given[7] != Py_None) row.limit = integer(given[7]);
  return row;
}

// The ids of group after group.
std::vector<int32_t> require_blocks(const Newcomer& row, int64_t length, const Rows& rows, const Pool& pool) {
  const Layout& layout = rows.layout();
  if (row.tables.size() != layout.num_groups()) raise(PyExc_ValueError, "a table for each group is needed");
  const size_t num_blocks = row.tables[0].size();
  std::vector<int32_t> ids;
  for (const std::vector<int32_t>& table : row.tables) {
    for (const int32_t id : table) pool.require(id);
    if (table.size() != num_blocks) raise(PyExc_ValueError, "tables of different lengths");
    ids.insert(ids.end(), table.begin(), table.end());
  }
  if (row.first_held.size() != layout.windows.size())
    raise(PyExc_ValueError, "a first block for each window is needed");
  for (const uint32_t first : row.first_held)
    if (first > num_blocks) raise(PyExc_ValueError, "a window begins behind the table");
  if (length > INT32_MAX) raise(PyExc_ValueError, "a row has 0 to %d tokens, not %lld", INT32_MAX, length);
  if (num_blocks * layout.block_size + 1 < static_cast<size_t>(length))
    raise(PyExc_ValueError, "a token before the last has no room");
  return ids;
}

// (request, table, late name or None, list of tokens, block ids, first held block of each window, computed tokens,
// limit or None; then as in `follow`)
PyObject* add(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    require_count(count, 12);
    RowsObject& object = rows_object_of(self);
    Rows& rows = *object.rows;
    Newcomer row = newcomer_of(given);
    Tail tail = tail_of(given[8], given[9], given[10], given[11], rows.layout().block_size);
    const int64_t length = PyList_Size(row.member.tokens.get());
    const std::vector<int32_t> ids = require_blocks(row, length, rows, pool_of(object.pool));
    require_tail(tail, length, rows.layout().block_size);
    const Ref owner = Ref::borrowed(self);
    set(row.member.table.get(), words.keeper, owner);
    if (row.member.late_name.get()) set(row.member.request.get(), words.keeper, owner);
    object.members->reserve(object.members->size() + 1);
    if (PyList_Append(object.requests, row.member.request.get()) < 0) throw Raised{};
    try {
      rows.add(length, row.limit, ids.data(), static_cast<uint32_t>(row.tables[0].size()), row.first_held.data());
    } catch (...) {
      PyList_SetSlice(object.requests, rows.size(), PY_SSIZE_T_MAX, nullptr);
      throw;
    }
    rows.follow(rows.size() - 1, std::move(tail));
    object.num_eager += !row.member.late_name.get();
    const Ref table = Ref::borrowed(row.member.table.get());
    object.members->push_back(std::move(row.member));
    set(table.get(), words.is_decoding, Ref::borrowed(Py_True));
    return none();
  });
}

// (row, request, how many tokens it has; then the tokens behind the last committed block, its name, encoded extra keys or
// None, first plain token). Nothing happens when the row is another's by now, or has moved on.
PyObject* follow(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    require_count(count, 7);
    RowsObject& object = rows_object_of(self);
    Rows& rows = *object.rows;
    const long long at = integer(given[0]), length = integer(given[2]);
    Tail tail = tail_of(given[3], given[4], given[5], given[6], rows.layout().block_size);
    if (at < 0 || static_cast<size_t>(at) >= rows.size() || rows.length(at) != length) return none();
    if ((*object.members)[at].request.get() != given[1]) return none();
    require_tail(tail, length, rows.layout().block_size);
    write_down(object, at);
    if (static_cast<size_t>(at) < rows.size() && rows.is_told(at)) rows.follow(at, std::move(tail));
    return none();
  });
}

using Places = std::vector<uint32_t>;

// The rows of these requests, rising. UsageError when one has none.
Places places_of(const RowsObject& object, const Items& requests) {
  std::vector<const PyObject*> wanted, found;
  for (size_t i = 0; i < requests.size(); i++) wanted.push_back(requests[i]);
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  Places places;
  for (size_t at = 0; at < object.members->size() && places.size() < wanted.size(); at++) {
    const PyObject* request = (*object.members)[at].request.get();
    if (wanted.size() == 1 ? request != wanted[0] : !std::binary_search(wanted.begin(), wanted.end(), request)) continue;
    places.push_back(static_cast<uint32_t>(at));
    found.push_back(request);
  }
  if (places.size() == wanted.size()) return places;
  std::sort(found.begin(), found.end());
  for (size_t i = 0; i < requests.size(); i++) {
    if (std::binary_search(found.begin(), found.end(), requests[i])) continue;
    const Ref stranger = Ref::borrowed(requests[i]);
    const Ref id = Ref::made(PyObject_GetAttrString(stranger.get(), "request_id"));
    raise(usage_error, "request %R leaves a batch that it is not in", id.get());
  }
  raise(PyExc_RuntimeError, "the requests changed while they were read");
}

// Somebody has written to the list, or was called when it was copied.
void rebuild(PyObject* list, const std::vector<Member>& members) {
  if (PyList_SetSlice(list, 0, PY_SSIZE_T_MAX, nullptr) < 0) throw Raised{};
  for (const Member& member : members)
    if (PyList_Append(list, member.request.get()) < 0) throw Raised{};
}

// The requests leave, up to date. UsageError, and nothing changes, when one has no row here.
PyObject* remove(PyObject* self, PyObject* given) {
  return guarded([&] {
    RowsObject& object = rows_object_of(self);
    Rows& rows = *object.rows;
    const Items requests(given);
    const Ref before = Ref::borrowed(object.requests);
    Ref left = Ref::made(PyList_GetSlice(before.get(), 0, PyList_Size(before.get())));
    const size_t count = rows.size();
    if (static_cast<size_t>(PyList_Size(left.get())) != count) rebuild(left.get(), *object.members);
    const Places places = places_of(object, requests);
    for (const uint32_t at : places)
      if (at < rows.size()) write_down(object, at);
    std::vector<Member> gone;
    gone.reserve(places.size());
    std::vector<uint8_t> is_gone(count);
    for (auto at = places.rbegin(); at != places.rend(); ++at) {
      is_gone[*at] = 1;
      if (PyList_SetSlice(left.get(), *at, *at + 1, nullptr) < 0) throw Raised{};
    }
    if (object.requests != before.get() || rows.size() != count)
      raise(PyExc_RuntimeError, "the batch changed while requests left it");
    rows.remove(is_gone);
    for (const uint32_t at : places) gone.push_back(std::move((*object.members)[at]));
    const auto is_empty = [](const Member& member) { return !member.request.get(); };
    object.members->erase(std::remove_if(object.members->begin(), object.members->end(), is_empty), object.members->end());
    const Ref old(std::exchange(object.requests, left.release()));
    for (const Member& member : gone) {
      object.num_eager -= !member.late_name.get();
      set(member.table.get(), words.keeper, Ref::borrowed(Py_None));
      set(member.table.get(), words.is_decoding, Ref::borrowed(Py_False));
      if (member.late_name.get()) set(member.request.get(), words.keeper, Ref::borrowed(Py_None));
    }
    return none();
  });
}

// Write down what is new of all rows.
PyObject* settle(PyObject* self, PyObject*) {
  return guarded([&] {
    write_all_down(rows_object_of(self));
    return none();
  });
}

// (thing, name). An attribute of a request or a table, once all is written down: nobody moves on in between.
PyObject* read(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    require_count(count, 2);
    write_all_down(rows_object_of(self));
    return PyObject_GenericGetAttr(given[0], given[1]);
  });
}

// (row, request, table) of each whose length is a multiple of the block size, up to date.
PyObject* borders(PyObject* self, PyObject*) {
  return guarded([&] {
    RowsObject& object = rows_object_of(self);
    const Rows& rows = *object.rows;
    std::vector<size_t> places;
    std::vector<Ref> requests, tables;
    for (size_t at = 0; at < rows.size(); at++) {
      if (rows.length(at) % rows.layout().block_size) continue;
      write_down(object, at);
      if (at >= rows.size()) break;
      places.push_back(at);
      requests.push_back(Ref::borrowed((*object.members)[at].request.get()));
      tables.push_back(Ref::borrowed((*object.members)[at].table.get()));
    }
    Ref all = Ref::made(PyList_New(0));
    for (size_t i = 0; i < places.size(); i++) {
      const Ref one = Ref::made(Py_BuildValue("(nOO)", places[i], requests[i].get(), tables[i].get()));
      if (PyList_Append(all.get(), one.get()) < 0) throw Raised{};
    }
    return all.release();
  });
}

}  // namespace

PyMethodDef rows_members_verbs[] = {{"add", as_verb(add), METH_FASTCALL, nullptr},
                                    {"follow", as_verb(follow), METH_FASTCALL, nullptr},
                                    {"remove", remove, METH_O, nullptr},
                                    {"settle", settle, METH_NOARGS, nullptr},
                                    {"read", as_verb(read), METH_FASTCALL, nullptr},
                                    {"borders", borders, METH_NOARGS, nullptr}};
const size_t num_rows_members_verbs = sizeof rows_members_verbs / sizeof rows_members_verbs[0];

}  // namespace kvpool
