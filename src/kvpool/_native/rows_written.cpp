// What requests and tables know of rows: written down late, and taken away before a step.
#include "rows_type.hpp"

namespace kvpool {

Words words;

void make_words() {
  const auto word = [](const char* text) { return Ref::made(PyUnicode_InternFromString(text)).release(); };
  words = {word("block_ids"), word("num_slots"),  word("num_computed"), word("num_committed"),
           word("last_stop"), word("first_held"), word("is_decoding"),  word("keeper")};
}

void set(PyObject* thing, PyObject* name, const Ref& value) {
  if (PyObject_SetAttr(thing, name, value.get()) < 0) throw Raised{};
}

namespace {

Ref number(long long value) { return Ref::made(PyLong_FromLongLong(value)); }

long long number_in(PyObject* thing, PyObject* name) {
  const Ref value = Ref::made(PyObject_GetAttr(thing, name));
  return integer(value.get());
}

// A list that becomes longer, and is as it was unless all of it was `kept`.
class Longer {
 public:
  explicit Longer(PyObject* list) : list_(Ref::borrowed(list)), size_(PyList_Size(list)) {
    if (size_ < 0) throw Raised{};
  }
  Longer(Longer&& other) noexcept = default;
  ~Longer() {
    if (list_.get() && !is_kept_) PyList_SetSlice(list_.get(), size_, PY_SSIZE_T_MAX, nullptr);
  }

  template <class Values>
  void add(const Values& values) {
    for (const auto value : values)
      if (PyList_Append(list_.get(), number(value).get()) < 0) throw Raised{};
  }
  void keep() { is_kept_ = true; }

 private:
  Ref list_;
  Py_ssize_t size_;
  bool is_kept_ = false;
};

PyObject* list_at(PyObject* lists, size_t at) {
  PyObject* list = PyList_GetItem(lists, at);
  if (!list) throw Raised{};
  return list;
}

// What is new of a row.
struct News {
  std::vector<int64_t> tokens;
  std::vector<std::vector<int32_t>> block_ids;  // of each group
  std::vector<uint32_t> first_held;             // of each window
  int64_t length, num_committed;
  size_t num_blocks;

  News(const Rows& rows, size_t at) {
    const Row& row = rows[at];
    const std::vector<int64_t>& recent = rows.recent(at);
    length = rows.length(at);
    num_committed = length - rows.fill(at);
    num_blocks = row.num_blocks;
    tokens.assign(recent.end() - (length - row.num_told_tokens), recent.end());
    for (unsigned group = 0; group < rows.layout().num_groups(); group++) {
      const int32_t* ids = rows.blocks().row(group, at);
      block_ids.emplace_back(ids + row.num_told_blocks, ids + row.num_blocks);
    }
    first_held.assign(rows.first_held(at), rows.first_held(at) + rows.layout().windows.size());
  }
};

// The table lets go of what the row holds no more: null blocks take its place.
void pass_over(const Layout& layout, PyObject* table, PyObject* block_ids, const std::vector<uint32_t>& first_held) {
  if (first_held.empty()) return;
  const Ref known = Ref::made(PyObject_GetAttr(table, words.first_held));
  for (size_t w = 0; w < first_held.size(); w++) {
    const long long before = integer(list_at(known.get(), w));
    const uint32_t live = first_held[w];
    if (PyList_SetItem(known.get(), w, number(live).release()) < 0) throw Raised{};
    for (unsigned group = 0; group < layout.num_groups(); group++) {
      if (layout.window_of[group] != w) continue;
      const Ref ids = Ref::borrowed(list_at(block_ids, group));
      for (long long at = std::max<long long>(before, layout.windows[w].num_sink_blocks); at < live; at++)
        if (PyList_SetItem(ids.get(), at, number(0).release()) < 0) throw Raised{};
    }
  }
}

void take(PyObject* thing, PyObject* name) {
  if (PyObject_SetAttr(thing, name, nullptr) < 0) PyErr_Clear();  // it was not there
}

}  // namespace

void write_down(RowsObject& object, size_t at) {
  Rows& rows = *object.rows;
  if (rows.is_told(at)) return;
  const News news(rows, at);
  const Member& member = (*object.members)[at];
  const Ref request = Ref::borrowed(member.request.get()), table = Ref::borrowed(member.table.get());
  const Ref tokens = Ref::borrowed(member.tokens.get()), block_ids = Ref::borrowed(member.block_ids.get());
  const Ref late_name = Ref::borrowed(member.late_name.get());
  const int64_t num_computed = std::max(member.num_computed, news.length - 1);
  std::vector<Longer> lists;
  lists.reserve(1 + news.block_ids.size());
  lists.emplace_back(tokens.get()).add(news.tokens);
  for (size_t group = 0; group < news.block_ids.size(); group++)
    lists.emplace_back(list_at(block_ids.get(), group)).add(news.block_ids[group]);
  set(table.get(), words.last_stop, number(std::max<long long>(number_in(table.get(), words.last_stop), news.num_committed)));
  set(table.get(), words.num_slots, number(news.num_blocks * rows.layout().block_size));
  set(table.get(), words.num_computed, number(num_computed));
  set(table.get(), words.num_committed, number(news.num_committed));
  pass_over(rows.layout(), table.get(), block_ids.get(), news.first_held);
  set(table.get(), words.block_ids, block_ids);
  if (late_name.get()) set(request.get(), late_name.get(), tokens);
  for (Longer& list : lists) list.keep();
  if (at < rows.size() && (*object.members)[at].request.get() == request.get()) rows.tell(at);
}

void write_all_down(RowsObject& object) {
  if (object.rows->num_told() == object.rows->size()) return;
  for (size_t at = 0; at < object.rows->size(); at++) write_down(object, at);
}

void take_away(RowsObject& object) {
  Rows& rows = *object.rows;
  for (size_t at = 0; rows.num_told() && at < rows.size(); at++) {
    if (!rows.is_told(at)) continue;
    const Member& member = (*object.members)[at];
    const Ref request = Ref::borrowed(member.request.get()), table = Ref::borrowed(member.table.get());
    const Ref late_name = Ref::borrowed(member.late_name.get());
    rows.untell(at);
    for (PyObject* name : {words.block_ids, words.num_slots, words.num_computed, words.num_committed})
      take(table.get(), name);
    if (late_name.get()) take(request.get(), late_name.get());
  }
}

}  // namespace kvpool
