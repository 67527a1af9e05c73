// The verbs of the rows of a decode batch.
#include "row_tokens.hpp"
#include "rows_type.hpp"

namespace kvpool {

namespace {

size_t require_row(long long at, const Rows& rows) {
  if (at < 0 || static_cast<size_t>(at) >= rows.size())
    raise(PyExc_IndexError, "there is no row %lld: the batch has %zd", at, static_cast<Py_ssize_t>(rows.size()));
  return static_cast<size_t>(at);
}

size_t row_of(PyObject* given, const Rows& rows) {
  const long long at = integer(given);  // may run whatever it likes, so before `rows` are looked at
  return require_row(at, rows);
}

void require_count(Py_ssize_t count, Py_ssize_t wanted) {
  if (count != wanted) raise(PyExc_TypeError, "%zd arguments are needed, %zd are given", wanted, count);
}

PyObject* list_of_rows(const std::vector<uint32_t>& rows) {
  return list_of(reinterpret_cast<const int32_t*>(rows.data()), rows.size());
}

PyObject* list_of_tokens(const int64_t* tokens, size_t count) {
  Ref list = Ref::made(PyList_New(count));
  for (size_t i = 0; i < count; i++)
    PyList_SetItem(list.get(), i, Ref::made(PyLong_FromLongLong(tokens[i])).release());
  return list.release();
}

// (length, limit or None, block ids of group after group, first held block of window after window)
PyObject* add(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    require_count(count, 4);
    Rows& rows = rows_of(self);
    const Pool& pool = pool_of(rows_object_of(self).pool);
    const Layout& layout = rows.layout();
    const long long length = integer(given[0]), limit = given[1] == Py_None ? INT64_MAX : integer(given[1]);
    if (length < 0 || length > INT32_MAX) raise(PyExc_ValueError, "a row has 0 to %d tokens, not %lld", INT32_MAX, length);
    const Items tables(given[2]);
    if (tables.size() != layout.num_groups()) raise(PyExc_ValueError, "a table for each group is needed");
    std::vector<int32_t> ids;
    size_t num_blocks = 0;
    for (size_t group = 0; group < tables.size(); group++) {
      const Ref kept = Ref::borrowed(tables[group]);
      const IdList table(kept.get());
      for (const int32_t id : table.get()) pool.require(id);
      if (group && table.get().size != num_blocks) raise(PyExc_ValueError, "tables of different lengths");
      num_blocks = table.get().size;
      ids.insert(ids.end(), table.get().begin(), table.get().end());
    }
    const IdList held(given[3]);
    if (held.get().size != layout.windows.size()) raise(PyExc_ValueError, "a first block for each window is needed");
    std::vector<uint32_t> first_held(held.get().begin(), held.get().end());
    for (const uint32_t first : first_held)
      if (first > num_blocks) raise(PyExc_ValueError, "a window begins behind the table");
    if (num_blocks * layout.block_size + 1 < static_cast<size_t>(length))
      raise(PyExc_ValueError, "a token before the last has no room");
    rows.add(length, limit, ids.data(), static_cast<uint32_t>(num_blocks), first_held.data());
    return none();
  });
}

// (row, tokens behind the last committed block, its name, encoded extra keys or None, first plain token)
PyObject* follow(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    require_count(count, 5);
    Rows& rows = rows_of(self);
    const RowTokens tokens(given[1]);
    const long long plain_from = integer(given[4]);
    const size_t at = row_of(given[0], rows);
    if (!tokens.fit()) raise(PyExc_ValueError, "these are no token ids");
    if (tokens.size() > rows.layout().block_size || static_cast<int64_t>(tokens.size()) > rows.length(at) ||
        (rows.length(at) - static_cast<int64_t>(tokens.size())) % rows.layout().block_size)
      raise(PyExc_ValueError, "%zd tokens do not reach the last committed block",
            static_cast<Py_ssize_t>(tokens.size()));
    const Name parent = name_of(given[2]);
    std::string extra;
    if (given[3] != Py_None) {
      if (!PyBytes_Check(given[3])) raise(PyExc_TypeError, "encoded extra keys are bytes, not %R", given[3]);
      extra.assign(PyBytes_AsString(given[3]), PyBytes_Size(given[3]));
    }
    rows.follow(at, tokens.data(), tokens.size(), parent, given[3] == Py_None ? nullptr : &extra, plain_from);
    return none();
  });
}

PyObject* remove(PyObject* self, PyObject* given) {
  return guarded([&] {
    Rows& rows = rows_of(self);
    const IdList gone(given);
    std::vector<uint8_t> is_gone(rows.size());
    for (const int32_t at : gone.get()) is_gone[require_row(at, rows)] = 1;
    rows.remove(is_gone);
    return none();
  });
}

// A tuple whose items can refer to nobody: the garbage collector need not look at it, as long as events are kept.
Ref plain(Ref tuple) {
  PyObject_GC_UnTrack(tuple.get());
  return tuple;
}

// What is put together of a BlockStored, and may be changed for the next one.
class StoredEvent {
 public:
  explicit StoredEvent(uint32_t block_size) : fields_(Ref::made(PyList_New(5))), arguments_(Ref::made(PyTuple_New(1))) {
    PyTuple_SetItem(arguments_.get(), 0, Ref::borrowed(fields_.get()).release());
    for (Py_ssize_t at = 0; at < 5; at++) set(at, Ref::borrowed(Py_None));
    set(3, Ref::made(PyLong_FromLong(block_size)));
  }

  void set(Py_ssize_t at, Ref value) { PyList_SetItem(fields_.get(), at, value.release()); }

  // `tuple.__new__(BlockStored, fields)`, which is what `BlockStored(*fields)` does.
  Ref made() const {
    return plain(Ref::made(new_tuple_(reinterpret_cast<PyTypeObject*>(block_stored), arguments_.get(), nullptr)));
  }

 private:
  const newfunc new_tuple_ = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
  Ref fields_, arguments_;
};

void tell_stored(const RowsObject& object, const Outcome& outcome) {
  const Layout& layout = object.rows->layout();
  const Ref all = Ref::made(PyList_New(outcome.stored.size() * layout.published.size()));
  Py_ssize_t place = 0;
  StoredEvent event(layout.block_size);
  const int64_t* token = outcome.tokens.data();
  for (const Stored& stored : outcome.stored) {
    Ref tokens = Ref::made(PyTuple_New(layout.block_size));
    for (uint32_t i = 0; i < layout.block_size; i++)
      PyTuple_SetItem(tokens.get(), i, Ref::made(PyLong_FromLongLong(*token++)).release());
    Ref names = Ref::made(PyTuple_New(1));
    PyTuple_SetItem(names.get(), 0, Ref::made(to_python(stored.name)).release());
    event.set(0, plain(std::move(names)));
    event.set(1, Ref::made(to_python(stored.parent)));
    event.set(2, plain(std::move(tokens)));
    for (const Published& published : layout.published) {
      event.set(4, Ref::made(PyLong_FromLong(published.group)));
      PyList_SetItem(all.get(), place++, event.made().release());
    }
  }
  const Ref told = Ref::made(PyObject_CallFunctionObjArgs(object.on_stored, all.get(), nullptr));
}

void tell_named(const RowsObject& object, const Outcome& outcome) {
  const Ref names = Ref::made(PyList_New(0));
  for (const Stored& stored : outcome.stored) {
    const Ref name = Ref::made(to_python(stored.name));
    if (PyList_Append(names.get(), name.get()) < 0) throw Raised{};
  }
  const Ref told = Ref::made(PyObject_CallFunctionObjArgs(object.on_named, names.get(), nullptr));
}

void tell(const RowsObject& object, const Outcome& outcome) {
  if (object.on_named && !outcome.stored.empty()) tell_named(object, outcome);
  if (object.on_stored && !outcome.stored.empty()) tell_stored(object, outcome);
  PyObject* on_removed = object_of(object.pool).on_removed;
  if (on_removed) tell_removed(on_removed, outcome.removed);
}

// `rows` are a copy, since making a list may collect garbage, and that may run whatever it likes.
PyObject* requests_of(PyObject* all, const std::vector<uint32_t> rows) {
  Ref list = Ref::made(PyList_New(rows.size()));
  for (size_t i = 0; i < rows.size(); i++) {
    PyObject* request = PyList_GetItem(all, rows[i]);
    if (!request) throw Raised{};
    PyList_SetItem(list.get(), i, Ref::borrowed(request).release());
  }
  return list.release();
}

// (requests that grew, their new blocks, requests without room); None where there are neither.
PyObject* answer(const RowsObject& object, const Outcome& outcome, PyObject* requests) {
  const std::vector<uint32_t>& unserved = object.rows->unserved();
  if (outcome.grown.empty() && unserved.empty()) return none();
  const Py_ssize_t num_groups = object.rows->layout().num_groups();
  const Ref grown = Ref::made(requests_of(requests, outcome.grown));
  const Ref ids = Ref::made(view_of_own(outcome.block_ids, "i", outcome.grown.size(), num_groups));
  const Ref left = Ref::made(requests_of(requests, unserved));
  return Py_BuildValue("(OOO)", grown.get(), ids.get(), left.get());
}

// Let `change` the rows, and answer and tell what it did; False where it could not. Who is told may call again, so the
// outcome is this call's own meanwhile.
template <class Change>
PyObject* told(RowsObject& object, PyObject* requests, Change change) {
  if (!PyList_Check(requests)) raise(PyExc_TypeError, "the requests are a list, not %R", requests);
  if (static_cast<size_t>(PyList_Size(requests)) != object.rows->size())
    raise(PyExc_ValueError, "%zd requests for %zd rows", PyList_Size(requests),
          static_cast<Py_ssize_t>(object.rows->size()));
  std::unique_ptr<Outcome> outcome(std::exchange(object.outcome, nullptr));
  if (!outcome) outcome = std::make_unique<Outcome>();
  const bool is_done = change(*outcome);
  Ref given = Ref::made(is_done ? answer(object, *outcome, requests) : PyBool_FromLong(0));
  if (is_done) tell(object, *outcome);
  if (!object.outcome) object.outcome = outcome.release();
  return given.release();
}

// (tokens, requests, is_published). False, and nothing has changed, unless there is a token for each row and a row for
// each token, all of them have room and, if it is not published already, all that is full can be published here.
PyObject* step(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    require_count(count, 3);
    RowsObject& object = rows_object_of(self);
    const int is_published = PyObject_IsTrue(given[2]);
    if (is_published < 0) throw Raised{};
    const RowTokens tokens(given[0]);
    Rows& rows = *object.rows;
    const bool can = tokens.fit() && tokens.size() == rows.size() && rows.unserved().empty();
    if (!can) return PyBool_FromLong(0);
    return told(object, given[1], [&](Outcome& outcome) {
      return rows.step(tokens.data(), is_published, object.on_stored, outcome);
    });
  });
}

PyObject* serve(PyObject* self, PyObject* requests) {
  return guarded([&] {
    RowsObject& object = rows_object_of(self);
    return told(object, requests, [&](Outcome& outcome) {
      object.rows->serve(object.on_stored, outcome);
      return true;
    });
  });
}

// (tokens, new block ids of every group, first held block of every window, tokens that are committed) since the last
// call; None where nothing is new.
PyObject* news(PyObject* self, PyObject* given) {
  return guarded([&]() -> PyObject* {
    Rows& rows = rows_of(self);
    const size_t at = row_of(given, rows);
    const Row& row = rows[at];
    if (!row.is_untold) return none();
    const Layout& layout = rows.layout();
    const size_t num_new = rows.length(at) - row.num_told_tokens;
    const std::vector<int64_t>& recent = rows.recent(at);
    const Ref tokens = Ref::made(list_of_tokens(recent.data() + recent.size() - num_new, num_new));
    const Ref tables = Ref::made(PyList_New(layout.num_groups()));
    for (unsigned group = 0; group < layout.num_groups(); group++) {
      const int32_t* ids = rows.blocks().row(group, at) + row.num_told_blocks;
      PyList_SetItem(tables.get(), group, Ref::made(list_of(ids, row.num_blocks - row.num_told_blocks)).release());
    }
    const int32_t* held = reinterpret_cast<const int32_t*>(rows.first_held(at));
    const Ref first_held = Ref::made(list_of(held, layout.windows.size()));
    const long long num_committed = rows.length(at) - rows.fill(at);
    Ref all = Ref::made(Py_BuildValue("(OOOL)", tokens.get(), tables.get(), first_held.get(), num_committed));
    rows.told(at);
    return all.release();
  });
}

PyObject* hide(PyObject* self, PyObject*) {
  rows_of(self).hide();
  return none();
}

// Rows that `wanted` by their place.
template <class Wanted>
PyObject* rows_where(const Rows& rows, Wanted wanted) {
  std::vector<uint32_t> found;
  for (size_t at = 0; at < rows.size(); at++)
    if (wanted(at)) found.push_back(static_cast<uint32_t>(at));
  return list_of_rows(found);
}

// (requests, some). The places of these among the requests, by identity.
PyObject* rows_of_requests(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    require_count(count, 2);
    const Items all(given[0]), some(given[1]);
    std::vector<const PyObject*> wanted;
    for (size_t i = 0; i < some.size(); i++) wanted.push_back(some[i]);
    std::sort(wanted.begin(), wanted.end());
    std::vector<uint32_t> found;
    for (size_t at = 0; at < all.size(); at++)
      if (std::binary_search(wanted.begin(), wanted.end(), all[at])) found.push_back(static_cast<uint32_t>(at));
    return list_of_rows(found);
  });
}

PyObject* border_rows(PyObject* self, PyObject*) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    return rows_where(rows, [&](size_t at) { return rows.length(at) % rows.layout().block_size == 0; });
  });
}

PyObject* ending_rows(PyObject* self, PyObject*) {
  return guarded([&] {
    const Rows& rows = rows_of(self);
    return rows_where(rows, [&](size_t at) { return rows.length(at) >= rows[at].limit - 1; });
  });
}

PyObject* unserved(PyObject* self, PyObject*) {
  return guarded([&] { return list_of_rows(rows_of(self).unserved()); });
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

PyMethodDef rows_verbs[] = {{"add", as_verb(add), METH_FASTCALL, nullptr},
                            {"follow", as_verb(follow), METH_FASTCALL, nullptr},
                            {"remove", remove, METH_O, nullptr},
                            {"step", as_verb(step), METH_FASTCALL, nullptr},
                            {"serve", serve, METH_O, nullptr},
                            {"news", news, METH_O, nullptr},
                            {"hide", hide, METH_NOARGS, nullptr},
                            {"rows_of", as_verb(rows_of_requests), METH_FASTCALL, nullptr},
                            {"border_rows", border_rows, METH_NOARGS, nullptr},
                            {"ending_rows", ending_rows, METH_NOARGS, nullptr},
                            {"unserved", unserved, METH_NOARGS, nullptr},
                            {"last_tokens", last_tokens, METH_NOARGS, nullptr},
                            {"lengths", lengths, METH_NOARGS, nullptr},
                            {"block_tables", block_tables, METH_O, nullptr},
                            {"slot_mapping", slot_mapping, METH_NOARGS, nullptr},
                            {nullptr, nullptr, 0, nullptr}};

}  // namespace kvpool
