// The Python object around rows, and what its verbs share.
//
// Owns: which request and which table a row is of. All changes to it are made while nobody else can run: no verb asks
// Python for memory that the garbage collector counts, or calls anything of Python's, between its first change and its
// last. What was read of the core before such a call may be true no longer after it.
#pragma once
#include <memory>

#include "pool_type.hpp"
#include "rows.hpp"
#include "view.hpp"

namespace kvpool {

// What Python has of a row.
struct Member {
  Ref request, table;
  Ref tokens;        // the request's list of tokens
  Ref block_ids;     // the table's list of a list for each group
  Ref late_name;     // the attribute of the request that may be taken away; empty: the request is always up to date
  int64_t num_computed = 0;  // when it joined: all tokens but the last at least
};

struct RowsObject {
  PyObject_HEAD
  Rows* rows;
  std::vector<Member>* members;  // of each row
  PyObject* requests;            // a list of theirs, for everybody to read
  size_t num_eager;              // members that have no late name
  PyObject* pool;
  PyObject* on_stored;  // called with a BlockStored for each block that became findable; nullptr: nobody listens
  PyObject* on_named;   // called with the names of new full blocks; nullptr: nobody wants them
  Outcome* outcome;     // of a step that is over, kept for its memory; nullptr: none yet, or a step uses it
};

inline RowsObject& rows_object_of(PyObject* self) { return *reinterpret_cast<RowsObject*>(self); }
inline Rows& rows_of(PyObject* self) { return *rows_object_of(self).rows; }

// Give requests and tables what is new of their rows.
void write_down(RowsObject& object, size_t at);
void write_all_down(RowsObject& object);

// Take away from requests and tables what will be true no longer; whoever reads it then asks for it to be written down.
void take_away(RowsObject& object);

// Names of attributes.
struct Words {
  PyObject *block_ids, *num_slots, *num_computed, *num_committed, *last_stop, *first_held, *is_decoding, *keeper;
};
extern Words words;
void make_words();

void set(PyObject* thing, PyObject* name, const Ref& value);
void require_count(Py_ssize_t count, Py_ssize_t wanted);

extern PyMethodDef rows_reading_verbs[];
extern const size_t num_rows_reading_verbs;
extern PyMethodDef rows_members_verbs[];
extern const size_t num_rows_members_verbs;
extern PyMethodDef rows_steps_verbs[];
extern const size_t num_rows_steps_verbs;

}  // namespace kvpool
