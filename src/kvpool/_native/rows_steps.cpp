// The verbs of rows that make steps, and tell of them.
#include <algorithm>

#include "row_tokens.hpp"
#include "rows_type.hpp"

namespace kvpool {

namespace {

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

using Refs = std::vector<Ref>;

Refs requests_of(const RowsObject& object, const std::vector<uint32_t>& rows) {
  Refs requests;
  requests.reserve(rows.size());
  for (const uint32_t at : rows) requests.push_back(Ref::borrowed((*object.members)[at].request.get()));
  return requests;
}

PyObject* list_of_requests(Refs requests) {
  Ref list = Ref::made(PyList_New(requests.size()));
  for (size_t i = 0; i < requests.size(); i++) PyList_SetItem(list.get(), i, requests[i].release());
  return list.release();
}

// What a step did, read of the core at once: before Python's memory is asked for.
struct Answer {
  Refs grown, unserved;

  Answer(const RowsObject& object, const Outcome& outcome)
      : grown(requests_of(object, outcome.grown)), unserved(requests_of(object, object.rows->unserved())) {}

  // (requests that grew, their new blocks, requests without room); None where there are neither.
  PyObject* made(const RowsObject& object, const Outcome& outcome) {
    if (grown.empty() && unserved.empty()) return none();
    const Py_ssize_t num_groups = object.rows->layout().num_groups();
    const Ref ids = Ref::made(view_of_own(outcome.block_ids, "i", grown.size(), num_groups));
    const Ref all = Ref::made(list_of_requests(std::move(grown)));
    const Ref left = Ref::made(list_of_requests(std::move(unserved)));
    return Py_BuildValue("(OOO)", all.get(), ids.get(), left.get());
  }
};

// Let `change` the rows, and answer and tell what it did; False where it could not. Who is told may call again, so the
// outcome is this call's own meanwhile.
template <class Change>
PyObject* told(RowsObject& object, Change change) {
  std::unique_ptr<Outcome> outcome(std::exchange(object.outcome, nullptr));
  if (!outcome) outcome = std::make_unique<Outcome>();
  Ref given;
  if (change(*outcome)) {
    Answer answer(object, *outcome);
    for (size_t at = 0; object.num_eager && at < object.rows->size(); at++)
      if (!(*object.members)[at].late_name.get()) write_down(object, at);
    given = Ref::made(answer.made(object, *outcome));
    tell(object, *outcome);
  } else {
    given = Ref::made(PyBool_FromLong(0));
  }
  if (!object.outcome) object.outcome = outcome.release();
  return given.release();
}

// (tokens, is_published). False, and nothing has changed, unless there is a token for each row and a row for each token,
// all of them have room and, if it is not published already, all that is full can be published here.
PyObject* step(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    require_count(count, 2);
    RowsObject& object = rows_object_of(self);
    const int is_published = PyObject_IsTrue(given[1]);
    if (is_published < 0) throw Raised{};
    const RowTokens tokens(given[0]);
    Rows& rows = *object.rows;
    if (!tokens.fit() || tokens.size() != rows.size() || !rows.unserved().empty()) return PyBool_FromLong(0);
    return told(object, [&](Outcome& outcome) {
      take_away(object);
      return tokens.size() == rows.size() && rows.unserved().empty() &&
             rows.step(tokens.data(), is_published, object.on_stored, outcome);
    });
  });
}

// Whether all have room now.
PyObject* serve(PyObject* self, PyObject*) {
  return guarded([&] {
    RowsObject& object = rows_object_of(self);
    if (!object.rows->unserved().empty()) {
      const Ref done = Ref::made(told(object, [&](Outcome& outcome) {
        take_away(object);
        object.rows->serve(object.on_stored, outcome);
        return true;
      }));
    }
    return PyBool_FromLong(object.rows->unserved().empty());
  });
}

}  // namespace

PyMethodDef rows_steps_verbs[] = {{"step", as_verb(step), METH_FASTCALL, nullptr},
                                  {"serve", serve, METH_NOARGS, nullptr}};
const size_t num_rows_steps_verbs = sizeof rows_steps_verbs / sizeof rows_steps_verbs[0];

}  // namespace kvpool
