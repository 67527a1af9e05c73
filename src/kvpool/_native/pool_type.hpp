// The Python object around a pool, and what its verbs share.
#pragma once
#include <memory>

#include "binding.hpp"

namespace kvpool {

struct PoolObject {
  PyObject_HEAD
  Pool* pool;
  PyObject* on_removed;  // called with names and their group when these can be found no longer; nullptr: nobody listens
  PyObject* lineages;    // a dict: what blocks depend on, where that is more than a parent
};

inline PoolObject& object_of(PyObject* self) { return *reinterpret_cast<PoolObject*>(self); }
inline Pool& pool_of(PyObject* self) { return *object_of(self).pool; }

inline bool is_given(PyObject* argument) { return argument && argument != Py_None; }

inline unsigned group_of(PyObject* given, const Pool& pool) {
  const long long group = given ? integer(given) : 0;
  if (group < 0 || group >= pool.num_groups())
    raise(PyExc_IndexError, "there is no group %lld: %u share the pool", group, pool.num_groups());
  return static_cast<unsigned>(group);
}

// Tell a listener what can be found no longer, group by group.
void tell_removed(PyObject* on_removed, const Dropped& dropped);

// Collects what is dropped if somebody listens, and tells it.
class Listener {
 public:
  explicit Listener(PyObject* self) : on_removed_(object_of(self).on_removed) {}
  Dropped* dropped() { return on_removed_ ? &dropped_ : nullptr; }
  void tell() const { tell_removed(on_removed_, dropped_); }

 private:
  PyObject* on_removed_;
  Dropped dropped_;
};

extern PyMethodDef reading_verbs[];
extern const size_t num_reading_verbs;
extern PyMethodDef changing_verbs[];
extern const size_t num_changing_verbs;

template <class Function>
PyCFunction as_verb(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace kvpool
