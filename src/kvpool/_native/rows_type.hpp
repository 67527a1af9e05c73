// The Python object around rows, and what its verbs share.
#pragma once
#include "pool_type.hpp"
#include "rows.hpp"
#include "view.hpp"

namespace kvpool {

struct RowsObject {
  PyObject_HEAD
  Rows* rows;
  PyObject* pool;
  PyObject* on_stored;  // called with a BlockStored for each block that became findable; nullptr: nobody listens
  PyObject* on_named;   // called with the names of new full blocks; nullptr: nobody wants them
  Outcome* outcome;     // of the last step, kept for its memory; nullptr while somebody is told
};

inline RowsObject& rows_object_of(PyObject* self) { return *reinterpret_cast<RowsObject*>(self); }
inline Rows& rows_of(PyObject* self) { return *rows_object_of(self).rows; }

extern PyMethodDef rows_verbs[];

}  // namespace kvpool
