// The verbs of a pool that change nothing.
#include "pool_type.hpp"

namespace kvpool {

namespace {

uint32_t block_of(PyObject* self, PyObject* given) { return pool_of(self).require(integer(given)); }

PyObject* free_block_ids(PyObject* self, PyObject*) {
  return guarded([&] {
    const FreeQueue& queue = pool_of(self).queue();
    std::vector<int32_t> ids;
    ids.reserve(queue.size());
    for (uint32_t id = queue.next(kNullBlock); id != kNullBlock; id = queue.next(id)) ids.push_back(id);
    return list_of(std::move(ids));
  });
}

PyObject* holders(PyObject* self, PyObject* block) {
  return guarded([&] { return PyLong_FromUnsignedLong(pool_of(self).holders(block_of(self, block))); });
}

PyObject* name(PyObject* self, PyObject* block) {
  return guarded([&] {
    const Name* found = pool_of(self).name(block_of(self, block));
    return found ? to_python(*found) : none();
  });
}

PyObject* group_id(PyObject* self, PyObject* block) {
  return guarded([&] { return PyLong_FromLong(pool_of(self).group(block_of(self, block))); });
}

PyObject* has_lineage(PyObject* self, PyObject* block) {
  return guarded([&] { return PyBool_FromLong(pool_of(self).has_lineage(block_of(self, block))); });
}

PyObject* names(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    static constexpr const char* words[] = {"group_id"};
    const Arguments<1> arguments(words, 0, 1, given, count, keywords);
    const Pool& pool = pool_of(self);
    const unsigned group = group_of(arguments.at[0], pool);
    std::vector<Name> all;
    for (uint32_t id = 1; id < pool.num_blocks(); id++)
      if (pool.is_found(id, group)) all.push_back(*pool.name(id));
    Ref found = Ref::made(PySet_New(nullptr));
    for (const Name& name : all) {
      const Ref one = Ref::made(to_python(name));
      if (PySet_Add(found.get(), one.get()) < 0) throw Raised{};
    }
    return found.release();
  });
}

PyObject* was_evicted(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    static constexpr const char* words[] = {"name", "group_id"};
    const Arguments<2> arguments(words, 1, 2, given, count, keywords);
    const unsigned group = group_of(arguments.at[1], pool_of(self));
    Name name;
    return PyBool_FromLong(read_name(arguments.at[0], name) && pool_of(self).was_evicted(name, group));
  });
}

constexpr size_t kSome = 128;

// Looks names up a few at a time, so that what stands behind the first miss is not even read. What is no name is not
// found.
void match_some(const Pool& pool, const Items& items, unsigned group, std::vector<int32_t>& found) {
  Name names[kSome];
  for (size_t first = 0; first < items.size(); first += kSome) {
    size_t some = 0;
    while (some < kSome && first + some < items.size() && read_name(items[first + some], names[some])) some++;
    found.resize(first + some);
    const size_t hits = pool.match({names, some}, group, found.data() + first);
    if (hits == kSome) continue;
    found.resize(first + hits);
    return;
  }
}

void match_each(const Pool& pool, PyObject* given, unsigned group, std::vector<int32_t>& found) {
  const Ref names = Ref::made(PyObject_GetIter(given));
  while (true) {
    const Ref next(PyIter_Next(names.get()));
    if (!next.get()) break;
    Name name;
    const uint32_t id = read_name(next.get(), name) ? pool.find(name, group) : 0;
    if (!id) return;
    found.push_back(id);
  }
  if (PyErr_Occurred()) throw Raised{};
}

PyObject* match(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    static constexpr const char* words[] = {"names", "group_id"};
    const Arguments<2> arguments(words, 1, 2, given, count, keywords);
    const Pool& pool = pool_of(self);
    const unsigned group = group_of(arguments.at[1], pool);
    PyObject* names = arguments.at[0];
    std::vector<int32_t> found;
    if (PyList_Check(names) || PyTuple_Check(names)) {
      match_some(pool, Items(names), group, found);
    } else if (is_row_of_bytes(names)) {
      const NameList row(names);
      found.resize(row.get().size);
      found.resize(pool.match(row.get(), group, found.data()));
    } else {
      match_each(pool, names, group, found);
    }
    return list_of(std::move(found));
  });
}

PyObject* match_into(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    static constexpr const char* words[] = {"names", "out", "group_id"};
    const Arguments<3> arguments(words, 2, 3, given, count, keywords);
    const unsigned group = group_of(arguments.at[2], pool_of(self));
    const NameList names(arguments.at[0]);
    const IdRoom out(arguments.at[1]);
    if (out.size() < names.get().size)
      raise(PyExc_ValueError, "%zd names and room for %zd ids", names.get().size, out.size());
    return PyLong_FromSize_t(pool_of(self).match(names.get(), group, out.data()));
  });
}

// `bound` is the pool and the group.
PyObject* find(PyObject* bound, PyObject* given) {
  return guarded([&] {
    const unsigned group = static_cast<unsigned>(PyLong_AsLong(PyTuple_GetItem(bound, 1)));
    Name name;
    const uint32_t id = read_name(given, name) ? pool_of(PyTuple_GetItem(bound, 0)).find(name, group) : 0;
    return id ? PyLong_FromUnsignedLong(id) : none();
  });
}

PyMethodDef find_method = {"find", find, METH_O, nullptr};

PyObject* finder(PyObject* self, PyObject* given) {
  return guarded([&] {
    const unsigned group = group_of(given, pool_of(self));
    const Ref bound = Ref::made(Py_BuildValue("(OI)", self, group));
    return PyCFunction_NewEx(&find_method, bound.get(), nullptr);
  });
}

PyObject* carry(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    static constexpr const char* words[] = {"block_ids", "names", "group_id"};
    const Arguments<3> arguments(words, 2, 3, given, count, keywords);
    const unsigned group = group_of(arguments.at[2], pool_of(self));
    const IdList ids(arguments.at[0]);
    const NameList names(arguments.at[1]);
    return PyBool_FromLong(pool_of(self).carry(ids.get(), names.get(), group));
  });
}

PyObject* num_idle(PyObject* self, PyObject* given) {
  return guarded([&] {
    const IdList ids(given);
    return PyLong_FromSize_t(pool_of(self).num_idle(ids.get()));
  });
}

PyObject* check(PyObject* self, PyObject*) {
  return guarded([&] {
    pool_of(self).check();
    return none();
  });
}

}  // namespace

PyMethodDef reading_verbs[] = {{"free_block_ids", free_block_ids, METH_NOARGS, nullptr},
                               {"holders", holders, METH_O, nullptr},
                               {"name", name, METH_O, nullptr},
                               {"group_id", group_id, METH_O, nullptr},
                               {"has_lineage", has_lineage, METH_O, nullptr},
                               {"names", as_verb(names), METH_FASTCALL | METH_KEYWORDS, nullptr},
                               {"was_evicted", as_verb(was_evicted), METH_FASTCALL | METH_KEYWORDS, nullptr},
                               {"match", as_verb(match), METH_FASTCALL | METH_KEYWORDS, nullptr},
                               {"match_into", as_verb(match_into), METH_FASTCALL | METH_KEYWORDS, nullptr},
                               {"finder", finder, METH_O, nullptr},
                               {"carry", as_verb(carry), METH_FASTCALL | METH_KEYWORDS, nullptr},
                               {"num_idle", num_idle, METH_O, nullptr},
                               {"check", check, METH_NOARGS, nullptr}};
const size_t num_reading_verbs = sizeof reading_verbs / sizeof reading_verbs[0];

}  // namespace kvpool
