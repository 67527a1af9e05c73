// The verbs of a pool that change it.
#include <map>

#include "dependents.hpp"
#include "pool_type.hpp"

namespace kvpool {

namespace {

PyObject* touch(PyObject* self, PyObject* given) {
  return guarded([&] {
    const IdList ids(given);
    pool_of(self).touch(ids.get());
    return none();
  });
}

PyObject* allocate(PyObject* self, PyObject* given) {
  return guarded([&]() -> PyObject* {
    Pool& pool = pool_of(self);
    int is_too_large = 0;
    const long long wanted = PyLong_AsLongLongAndOverflow(given, &is_too_large);
    if (wanted == -1 && PyErr_Occurred()) throw Raised{};
    if (is_too_large > 0 || wanted > pool.num_free()) return none();
    if (is_too_large || wanted < 0) raise(PyExc_ValueError, "%R blocks cannot be allocated", given);
    const size_t count = static_cast<size_t>(wanted);
    std::vector<int32_t> taken(count);
    Listener listener(self);
    pool.allocate(count, taken.data(), listener.dropped());
    Ref list;
    try {
      list = Ref(list_of(taken));
    } catch (const Raised&) {
      pool.free({taken.data(), count}, Runs::kOne);  // nobody would know of them
      throw;
    }
    listener.tell();
    return list.release();
  });
}

PyObject* allocate_into(PyObject* self, PyObject* given) {
  return guarded([&] {
    const IdRoom out(given);
    Listener listener(self);
    const bool is_served = pool_of(self).allocate(out.size(), out.data(), listener.dropped());
    listener.tell();
    return PyBool_FromLong(is_served);
  });
}

Parent parent_of(PyObject* given) {
  if (given == Py_None) return {Parent::kNone, 0};
  if (!PyBytes_Check(given) && !PyIndex_Check(given)) return {Parent::kOutside, 0};
  return {Parent::kPlain, secrets().fold(name_of(given))};
}

class Parents {
 public:
  Parents(PyObject* given, size_t count) {
    if (!is_given(given)) return;
    items_ = std::make_unique<Items>(given);
    if (items_->size() != count)
      raise(PyExc_ValueError, "%zd names and %zd parents: one for each", count, items_->size());
    parents_.reserve(count);
    for (size_t i = 0; i < count; i++) {
      parents_.push_back(parent_of((*items_)[i]));
      if (parents_.back().kind == Parent::kOutside) outside_.push_back(i);
    }
  }

  const Parent* data() const { return items_ ? parents_.data() : nullptr; }

  // Before the blocks have names, so that a failure is noticed by nobody.
  void note_outside(PyObject* lineages, Pool& pool, Ids ids) const {
    if (outside_.empty()) return;
    pool.require_unnamed(ids);
    for (const size_t i : outside_) {
      const Ref id = Ref::made(PyLong_FromLong(ids[i]));
      if (PyDict_SetItem(lineages, id.get(), (*items_)[i]) < 0) throw Raised{};
    }
  }

 private:
  std::unique_ptr<Items> items_;
  std::vector<Parent> parents_;
  std::vector<size_t> outside_;
};

PyObject* commit(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    static constexpr const char* words[] = {"block_ids", "names", "group_id", "parents", "spare"};
    const Arguments<5> arguments(words, 2, 4, given, count, keywords);
    Pool& pool = pool_of(self);
    const unsigned group = group_of(arguments.at[2], pool);
    const IdList block_ids(arguments.at[0]);
    const NameList names(arguments.at[1]);
    const Ids ids = block_ids.get();
    if (ids.size != names.get().size)
      raise(PyExc_ValueError, "%zd blocks and %zd names: one for each", ids.size, names.get().size);
    const Parents parents(arguments.at[3], ids.size);
    std::unique_ptr<IdList> spare(arguments.at[4] ? new IdList(arguments.at[4]) : nullptr);
    parents.note_outside(object_of(self).lineages, pool, ids);
    pool.commit(ids, names.get(), group, parents.data(), spare ? spare->get() : Ids{});
    return none();
  });
}

// UsageError for the first block that is freed more often than held.
[[noreturn]] void refuse(const Pool& pool, Ids ids, size_t place) {
  std::unordered_map<int32_t, long long> times;
  for (const int32_t id : ids) times[id]++;
  for (const int32_t id : ids) {
    const long long held = id > 0 && static_cast<uint32_t>(id) < pool.num_blocks() ? pool.holders(id) : 0;
    if (id && times[id] > held)
      raise(usage_error, "block %d is freed %lld times at once, and has %lld holders", id, times[id], held);
  }
  raise(PyExc_SystemError, "block %d could not be freed", ids[place]);
}

PyObject* free_blocks(PyObject* self, PyObject* given) {
  return guarded([&] {
    try {
      const IdList block_ids(given);
      const Ids ids = block_ids.get();
      const size_t freed = pool_of(self).free(ids, Runs::kOne);
      if (freed < ids.size) refuse(pool_of(self), ids, freed);
    } catch (const NoSuchBlock& error) {
      raise(usage_error, "block %lld is freed 1 times at once, and has 0 holders", static_cast<long long>(error.id));
    }
    return none();
  });
}

void free_counted(PyObject* self, Ids ids, Runs runs) {
  const size_t freed = pool_of(self).free(ids, runs);
  if (freed < ids.size)
    raise(PyExc_AssertionError, "invariant 1: block %d is freed more often than held", ids[freed]);
}

PyObject* free_each(PyObject* self, PyObject* given) {
  return guarded([&] {
    const IdList ids(given);
    free_counted(self, ids.get(), Runs::kEach);
    return none();
  });
}

PyObject* free_groups(PyObject* self, PyObject* given) {
  return guarded([&] {
    std::vector<int32_t> all;
    const Items runs(given);
    for (size_t i = 0; i < runs.size(); i++) {
      const Ref kept = Ref::borrowed(runs[i]);
      const IdList run(kept.get());
      for (const int32_t id : run.get()) {
        if (!id) raise(PyExc_AssertionError, "invariant 1: block 0 is freed more often than held");
        all.push_back(id);
      }
      all.push_back(kNullBlock);
    }
    free_counted(self, {all.data(), all.size()}, Runs::kParted);
    return none();
  });
}

PyObject* keep(PyObject* self, PyObject* given) {
  return guarded([&] {
    const IdList ids(given);
    pool_of(self).keep(ids.get());
    return none();
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(pool_of(self).clear()); });
}

int64_t num_tokens_of(PyObject* given) {
  constexpr int64_t most = int64_t{1} << 60;
  const int64_t count = integer(given);
  return count > most ? most : count < -most ? -most : count;
}

// `(kind, block, name, num_tokens)`, see `Tie`.
std::vector<Tie> ties_of(PyObject* given, const Pool& pool) {
  std::vector<Tie> ties;
  const Items items(given);
  for (size_t i = 0; i < items.size(); i++) {
    const Ref kept = Ref::borrowed(items[i]);
    const Items parts(kept.get());
    const long long kind = integer(parts[0]);
    if (kind < Tie::kBorder || kind > Tie::kWhole) raise(PyExc_ValueError, "there is no tie of kind %lld", kind);
    const uint32_t block = pool.require(integer(parts[1]));
    const uint64_t folded = secrets().fold(name_of(parts[2]));
    if (pool.name(block)) ties.push_back({static_cast<Tie::Kind>(kind), block, folded, num_tokens_of(parts[3])});
  }
  return ties;
}

// What is bad, and all that depends on it.
std::vector<uint32_t> dependents_of(const Pool& pool, PyObject* const* given, Py_ssize_t count, bool with_lost) {
  if (count != 2) raise(PyExc_TypeError, "names and ties are needed, %zd arguments are given", count);
  std::vector<std::pair<uint64_t, int64_t>> bad;
  const Ref pairs = Ref::made(PyMapping_Items(given[0]));
  const Items items(pairs.get());
  for (size_t i = 0; i < items.size(); i++) {
    const Ref kept = Ref::borrowed(items[i]);
    const Items pair(kept.get());
    bad.emplace_back(secrets().fold(name_of(pair[0])), num_tokens_of(pair[1]));
  }
  const std::vector<Tie> ties = ties_of(given[1], pool);
  Dependents dependents(pool, ties);
  if (with_lost) dependents.add_lost();
  for (const auto& one : bad) dependents.add(one.first, one.second);
  return dependents.blocks();
}

PyObject* find_dependents(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    const std::vector<uint32_t> blocks = dependents_of(pool_of(self), given, count, false);
    return list_of({blocks.begin(), blocks.end()});
  });
}

PyObject* withdraw_dependents(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    const std::vector<uint32_t> blocks = dependents_of(pool_of(self), given, count, true);
    Listener listener(self);
    pool_of(self).forget(blocks, listener.dropped());
    listener.tell();
    return PyLong_FromSize_t(blocks.size());
  });
}

}  // namespace

void tell_removed(PyObject* on_removed, const Dropped& dropped) {
  std::map<uint8_t, Ref> lists;
  for (size_t i = 0; i < dropped.names.size(); i++) {
    Ref& names = lists[dropped.group_of_name[i]];
    if (!names.get()) names = Ref::made(PyList_New(0));
    const Ref name = Ref::made(to_python(dropped.names[i]));
    if (PyList_Append(names.get(), name.get()) < 0) throw Raised{};
  }
  for (const auto& [group, names] : lists)
    const Ref told = Ref::made(PyObject_CallFunction(on_removed, "OI", names.get(), unsigned{group}));
}

PyMethodDef changing_verbs[] = {{"touch", touch, METH_O, nullptr},
                                {"allocate", allocate, METH_O, nullptr},
                                {"allocate_into", allocate_into, METH_O, nullptr},
                                {"commit", as_verb(commit), METH_FASTCALL | METH_KEYWORDS, nullptr},
                                {"free", free_blocks, METH_O, nullptr},
                                {"free_each", free_each, METH_O, nullptr},
                                {"free_groups", free_groups, METH_O, nullptr},
                                {"keep", keep, METH_O, nullptr},
                                {"clear", clear, METH_NOARGS, nullptr},
                                {"find_dependents", as_verb(find_dependents), METH_FASTCALL, nullptr},
                                {"withdraw_dependents", as_verb(withdraw_dependents), METH_FASTCALL, nullptr}};
const size_t num_changing_verbs = sizeof changing_verbs / sizeof changing_verbs[0];

}  // namespace kvpool
