// The requests that decode together, a row each: the native twin of kvpool.core.decode_batch.DecodeBatch.
//
// Owns: lengths, block tables and the last tokens of the rows, and the names of the blocks before these.
// Knows nothing of: Python, requests, which blocks are shared, what is in a block's name beside tokens.
//
// All groups have blocks of one size, and every row has equally many in each. Ids and counts come from a caller that
// checked them.
#pragma once
#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "block_matrix.hpp"
#include "hashing.hpp"
#include "pool.hpp"

namespace kvpool {

// Groups of one kind whose blocks fall out of use.
struct Window {
  int64_t num_tokens;
  uint32_t num_sink_blocks;
};

constexpr unsigned kKeepsAll = UINT_MAX;
constexpr unsigned kMostGroups = 256;

// A group that publishes its full blocks; spare ones are evicted first.
struct Published {
  unsigned group;
  bool is_spare;
};

// What follows from the kinds of layers.
struct Layout {
  uint32_t block_size;
  bool keeps_last_border;
  std::vector<Window> windows;
  std::vector<unsigned> window_of;    // of each group; kKeepsAll: none
  std::vector<Published> published;   // in the order in which they are told of
  std::vector<uint8_t> lets_go_after; // a row of n tokens may let go of blocks where this holds for n % block_size

  unsigned num_groups() const { return static_cast<unsigned>(window_of.size()); }
  bool is_plain() const { return window_of.size() == 1 && windows.empty(); }
};

// What a step does not look at of each row.
struct Row {
  uint32_t num_blocks = 0;         // in each group
  int64_t plain_from = INT64_MAX;  // blocks that begin here or later are named and published like any other
  int64_t limit = INT64_MAX;       // its length at its end
  int64_t num_told_tokens = 0;     // its request knows of so many
  uint32_t num_told_blocks = 0;
  bool has_extra = false;
  Name parent{};                   // of the last committed block
  std::string extra;               // encoded extra keys of every block from `plain_from` on
};

// What follows the last committed block of a row, for `follow`.
struct Tail {
  std::vector<int64_t> tokens;
  Name parent{};
  bool has_extra = false;
  std::string extra;
  int64_t plain_from = INT64_MAX;
};

// Block `first_block` of a row became findable in all groups that publish.
struct Stored {
  uint32_t row;
  Name name, parent;
};

// What a step did. Where nobody listens, `removed` and `tokens` stay empty.
struct Outcome {
  std::vector<uint32_t> grown;     // rows with one block more in each group
  std::vector<int32_t> block_ids;  // these, row by row, group by group
  std::vector<Stored> stored;
  std::vector<int64_t> tokens;     // of the blocks that were stored, one after the other
  Dropped removed;                 // by allocation

  void clear() { grown.clear(), block_ids.clear(), stored.clear(), tokens.clear(), removed.clear(); }
};

class Rows {
 public:
  Rows(Pool& pool, Layout layout)
      : pool_(pool), layout_(std::move(layout)), blocks_(layout_.num_groups()), lengths_(kFirst),
        messages_(layout_.block_size) {}

  size_t size() const { return rows_.size(); }
  const Layout& layout() const { return layout_; }
  const Row& operator[](size_t at) const { return rows_[at]; }
  int64_t length(size_t at) const { return lengths_[at]; }
  uint32_t fill(size_t at) const { return fills_[at]; }
  const std::vector<int64_t>& recent(size_t at) const { return recent_[at]; }
  const BlockMatrix& blocks() const { return blocks_; }
  const Shared<int64_t>& lengths() const { return lengths_; }
  const std::vector<uint32_t>& unserved() const { return unserved_; }
  const uint32_t* first_held(size_t at) const { return first_held_.data() + at * layout_.windows.size(); }

  // Whether its request knows of all tokens and blocks of the row; and how many do.
  bool is_told(size_t at) const { return told_[at]; }
  size_t num_told() const { return num_told_; }

  // The most blocks that a row has in a group.
  size_t num_columns() const { return num_columns_; }

  // A row at the end: `num_blocks` ids of group after group, the first held block of every window.
  void add(int64_t length, int64_t limit, const int32_t* ids, uint32_t num_blocks, const uint32_t* first_held) {
    const size_t at = size(), num_windows = layout_.windows.size();
    blocks_.reserve(at + 1, num_blocks + 1, at);
    reserve_lengths(at + 1);
    make_room(unserved_, 1);
    make_room(first_held_, num_windows);
    make_room(fills_, 1);
    make_room(told_, 1);
    make_room(recent_, 1);
    rows_.emplace_back();
    told_.push_back(1);
    num_told_++;
    fills_.push_back(0);
    recent_.emplace_back();
    Row& row = rows_.back();
    row.limit = limit;
    row.num_blocks = row.num_told_blocks = num_blocks;
    lengths_[at] = row.num_told_tokens = length;
    num_columns_ = std::max(num_columns_, num_blocks);
    for (unsigned group = 0; group < layout_.num_groups(); group++)
      if (num_blocks) std::memcpy(blocks_.row(group, at), ids + size_t{group} * num_blocks, 4 * num_blocks);
    first_held_.insert(first_held_.end(), first_held, first_held + num_windows);
    if (num_slots(row) < length) unserved_.push_back(static_cast<uint32_t>(at));
  }

  // All blocks of the row before these last tokens are committed, the last of them under the name `parent`. At most a
  // block of tokens, in a vector with room for one.
  void follow(size_t at, Tail&& tail) {
    Row& row = rows_[at];
    recent_[at].swap(tail.tokens);
    row.extra.swap(tail.extra);
    row.has_extra = tail.has_extra;
    fills_[at] = static_cast<uint32_t>(recent_[at].size());
    row.num_told_tokens = lengths_[at];
    row.parent = tail.parent;
    row.plain_from = tail.plain_from;
    note_width(recent_[at].data(), recent_[at].size(), at, 0);
  }

  // The rows that `is_gone` leave, the others keep their order.
  void remove(const std::vector<uint8_t>& is_gone);

  // What its request knows of the row may be true no longer.
  void untell(size_t at) {
    num_told_ -= told_[at];
    told_[at] = 0;
  }

  // Its request knows of all tokens and blocks of the row now.
  void tell(size_t at) {
    Row& row = rows_[at];
    recent_[at].erase(recent_[at].begin(), recent_[at].end() - fills_[at]);
    row.num_told_tokens = lengths_[at];
    row.num_told_blocks = row.num_blocks;
    num_told_ += !told_[at];
    told_[at] = 1;
  }

  // All blocks that are full now are committed, then each row has one token more, and room for it where there is any.
  // Nobody must be unserved. False, and nothing has changed, when a full block cannot be named and published here, or
  // when all should be published already, and one is not.
  bool step(const int64_t* tokens, bool is_published, bool is_listened_to, Outcome& outcome);

  // Room for those that are unserved, as far as there is any.
  void serve(bool is_listened_to, Outcome& outcome);

  // The slot of the last token of each row, group after group; in the null block where it has no room.
  void slots(int64_t* out) const {
    const int64_t size = layout_.block_size;
    for (unsigned group = 0; group < layout_.num_groups(); group++)
      for (size_t at = 0; at < rows_.size(); at++) {
        const int64_t last = lengths_[at] - 1, block = last / size;
        const int64_t id = block < rows_[at].num_blocks ? blocks_.row(group, at)[block] : 0;
        *out++ = id * size + last % size;
      }
  }

 private:
  static constexpr size_t kFirst = 16;

  // A row that needs a block, or may let go of some.
  struct Turn {
    uint32_t row;
    bool lets_go;
  };

  int64_t num_slots(const Row& row) const { return int64_t{row.num_blocks} * layout_.block_size; }

  // More can be added without asking for memory.
  template <class T>
  static void make_room(std::vector<T>& values, size_t more) {
    if (values.capacity() < values.size() + more) values.reserve(2 * values.size() + more);
  }

  void reserve_lengths(size_t count) {
    if (count <= num_lengths_) return;
    Shared<int64_t> larger(2 * num_lengths_);
    std::memcpy(larger.data(), lengths_.data(), 8 * num_lengths_);
    lengths_ = larger, num_lengths_ *= 2;
  }

  // Tokens of more than 32 bits are hashed by others.
  void note_width(const int64_t* tokens, size_t count, size_t first, size_t step) {
    int64_t all = 0;
    for (size_t i = 0; i < count; i++) all |= tokens[i];
    if (all >> 32)
      for (size_t i = 0; i < count; i++)
        if (tokens[i] >> 32) rows_[first + i * step].plain_from = INT64_MAX;
  }

  bool prepare(bool is_published, Outcome& outcome, bool is_listened_to);
  void publish(Outcome& outcome, bool is_listened_to);
  Ids full_blocks(unsigned group);
  void name_full_blocks(Outcome& outcome, bool is_listened_to);
  void append(const int64_t* tokens);
  void extend(Outcome& outcome, bool is_listened_to);
  void extend_at_once(Outcome& outcome, bool is_listened_to);
  void let_go(size_t at);
  template <class Do>
  void for_each_dead(const Row& row, size_t at, const uint32_t* first, const uint32_t* live, Do do_with) const;
  bool allocate(size_t count, int32_t* taken, Outcome& outcome, bool is_listened_to);
  void grow(size_t at, const int32_t* ids);

  Pool& pool_;
  const Layout layout_;
  BlockMatrix blocks_;
  Shared<int64_t> lengths_;
  size_t num_lengths_ = kFirst;
  std::vector<Row> rows_;
  std::vector<uint32_t> fills_;                // how many tokens lie behind the last committed block
  std::vector<uint8_t> told_;
  size_t num_told_ = 0;
  std::vector<std::vector<int64_t>> recent_;   // the last tokens, these at least; room for a block that is not full
  uint32_t num_columns_ = 0;
  std::vector<uint32_t> first_held_;  // of each row, for each window: blocks before were let go of, but for sinks
  std::vector<uint32_t> unserved_;
  size_t num_settled_ = 0;  // rows before this one have let go of all they could when they last got room
  BlockMessages messages_;
  // Of one step.
  std::vector<uint32_t> full_;
  std::vector<Turn> turns_;
  std::vector<int32_t> ids_;
  std::vector<Name> names_;
  std::vector<Single> singles_;
  std::vector<Parent> parents_;
};

}  // namespace kvpool

#include "rows_step.hpp"
