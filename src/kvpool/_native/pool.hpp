// The native twin of kvpool.core.block_pool.BlockPool: the same answers after every operation.
//
// Owns: every block's holders and name, an index of names for each group, the free queue.
// Knows nothing of: Python, requests, layers, tokens, bytes, time, who listens.
//
// Ids come unchecked from outside. Every verb looks at all of them before it changes anything.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "free_queue.hpp"
#include "name_table.hpp"
#include "names.hpp"
#include "recent_names.hpp"

namespace kvpool {

// An id that is no block of the pool.
struct NoSuchBlock {
  int64_t id;
};

// A broken protocol of a call; the state is as it was.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A broken invariant, with its number.
struct Broken : std::logic_error {
  using std::logic_error::logic_error;
};

template <class T>
struct Span {
  const T* data = nullptr;
  size_t size = 0;

  const T& operator[](size_t at) const { return data[at]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

using Ids = Span<int32_t>;
using Names = Span<Name>;

// Names that can be found no longer, in order.
struct Dropped {
  std::vector<Name> names;
  std::vector<uint8_t> group_of_name;

  void clear() { names.clear(), group_of_name.clear(); }

  void reserve_more(size_t count) {
    names.reserve(names.size() + count);
    group_of_name.reserve(names.size() + count);
  }
};

// How ids are to be freed: as one run; as several with the null block between two; each for itself.
enum class Runs { kOne, kParted, kEach };

// What a block depends on, for `commit`.
struct Parent {
  enum Kind : uint8_t { kNone, kPlain, kOutside } kind;  // outside: the caller notes it
  uint64_t folded;
};

class Pool {
 public:
  Pool(uint32_t num_blocks, unsigned num_groups, bool is_ranked)
      : num_blocks_(num_blocks), num_groups_(num_groups), is_ranked_(is_ranked), queue_(num_blocks),
        names_(num_blocks), parents_(num_blocks), table_(num_blocks), recent_(num_groups) {}

  uint32_t num_blocks() const { return num_blocks_; }
  uint32_t num_free() const { return queue_.size(); }
  uint32_t num_cached() const { return num_cached_; }
  uint64_t num_evictions() const { return num_evictions_; }
  unsigned num_groups() const { return num_groups_; }
  bool is_ranked() const { return is_ranked_; }
  size_t bytes() const { return queue_.bytes() + names_.bytes() + parents_.bytes() + table_.bytes(); }
  const FreeQueue& queue() const { return queue_; }

  uint32_t require(int64_t id) const {
    if (id < 0 || id >= num_blocks_) throw NoSuchBlock{id};
    return static_cast<uint32_t>(id);
  }
  uint32_t holders(uint32_t id) const { return queue_[id].has(kHeld) ? queue_[id].before : 0; }
  const Name* name(uint32_t id) const { return queue_[id].has(kNamed) ? &names_[id] : nullptr; }
  unsigned group(uint32_t id) const { return queue_[id].group; }
  bool has_lineage(uint32_t id) const { return queue_[id].has(kLineage); }
  bool was_evicted(const Name& name, unsigned group) const { return recent_[group].contains(secrets().fold(name)); }

  // Whether this is the block that is found under its name in the group.
  bool is_found(uint32_t id, unsigned group) const {
    const Block& block = queue_[id];
    return block.has(kNamed) && !block.has(kCopy) && block.group == group;
  }

  // The block that is found under the name; 0 where there is none.
  uint32_t find(const Name& name, unsigned group) const { return find_at(place(name, group), name, group); }

  // The blocks of the longest findable prefix; answers how many.
  size_t match(Names names, unsigned group, int32_t* out) const {
    for (size_t first = 0; first < names.size; first += kAhead) {
      const size_t some = names.size - first < kAhead ? names.size - first : kAhead;
      uint64_t places[kAhead];
      uint32_t likely[kAhead];
      for (size_t i = 0; i < some; i++) {
        places[i] = place(names[first + i], group);
        table_.prefetch(NameTable::home_of(places[i]));
      }
      for (size_t i = 0; i < some; i++) {
        likely[i] = table_.candidate(places[i]);
        __builtin_prefetch(&names_[likely[i]]);
        if (num_groups_ > 1) queue_.prefetch(likely[i]);
      }
      for (size_t i = 0; i < some; i++) {
        const Name& name = names[first + i];
        const bool is_it = likely[i] && carries(likely[i], name, group);
        const uint32_t id = is_it ? likely[i] : find_at(places[i], name, group);
        if (!id) return first + i;
        out[first + i] = static_cast<int32_t>(id);
      }
    }
    return names.size;
  }

  bool carry(Ids ids, Names names, unsigned group) const {
    for (const int32_t id : ids) require(id);
    if (ids.size != names.size) return false;
    for (size_t i = 0; i < ids.size; i++) {
      const Block& block = queue_[ids[i]];
      if (!block.has(kNamed) || names_[ids[i]] != names[i]) return false;
      if (num_groups_ > 1 && block.group != group) return false;
    }
    return true;
  }

  size_t num_idle(Ids ids) const {
    size_t count = 0;
    for (const int32_t id : ids) count += !queue_[require(id)].has(kHeld);
    return count;
  }

  // One more holder for each.
  void touch(Ids ids) {
    uint32_t num_taken = 0;
    for (const int32_t id : ids) queue_.prefetch(static_cast<uint32_t>(id) < num_blocks_ ? id : 0);
    for (const int32_t id : ids) {
      const Block& block = queue_[require(id)];
      if (block.has(kHeld)) continue;
      if (!block.has(kNamed)) throw Refused(text("block ", id, " is touched, and nobody holds it or can find it"));
      queue_.prefetch(queue_.previous(id));
      queue_.prefetch(queue_.next(id));
    }
    for (const int32_t id : ids) {
      Block& block = queue_[id];
      if (is_ranked_) block.marks &= static_cast<uint8_t>(~kSpare);
      if (block.has(kHeld)) {
        block.before++;
      } else {
        queue_.remove(id);
        num_taken++;
      }
    }
    num_cached_ -= num_taken;
  }

  // `count` blocks with one holder and no name; false, and nothing has changed, when fewer are free.
  bool allocate(size_t count, int32_t* taken, Dropped* dropped) {
    if (count > queue_.size()) return false;
    if (dropped) dropped->reserve_more(count);
    queue_.take(static_cast<uint32_t>(count), reinterpret_cast<uint32_t*>(taken));
    uint32_t num_named = 0;
    for (size_t first = 0; first < count; first += kAhead) {
      const Ids some{taken + first, count - first < kAhead ? count - first : kAhead};
      uint64_t folds[kAhead];
      look_ahead(some, folds);
      for (size_t i = 0; i < some.size; i++) {
        const uint32_t id = some[i];
        if (!queue_[id].has(kNamed)) continue;
        const unsigned group = queue_[id].group;
        num_named++;
        if (drop(id, dropped)) recent_[group].add(folds[i]);
      }
    }
    for (RecentNames& recent : recent_) recent.turn();
    num_evictions_ += num_named;
    num_cached_ -= num_named;
    return true;
  }

  // Throw unless all of these are held, have no name, and are there once.
  void require_unnamed(Ids ids);

  // These held blocks can be found under these names from now on. `parents` has one for each, or is nullptr.
  void commit(Ids ids, Names names, unsigned group, const Parent* parents, Ids spare) {
    if (ids.size != names.size) throw std::invalid_argument("one name for each block");
    require_unnamed(ids);
    for (const int32_t id : spare) require(id);
    if (spare.size && !is_ranked_) throw Broken("a spare block in a pool without ranks");
    size_t done = 0;
    try {
      for (; done < ids.size; done++) {
        if (done % kAhead == 0) find_room(names, done, group);
        add(ids[done], names[done], place_of_next_[done % kAhead], group);
      }
    } catch (const std::bad_alloc&) {
      while (done) drop(ids[--done], nullptr);
      throw;
    }
    for (size_t i = 0; parents && i < ids.size; i++) note(ids[i], parents[i]);
    const bool are_all_spare = spare.size == ids.size;
    for (const int32_t id : are_all_spare && spare.size ? ids : spare) queue_[id].marks |= kSpare;
  }

  // These blocks are spare no longer.
  void keep(Ids ids) {
    for (const int32_t id : ids) require(id);
    for (const int32_t id : ids) queue_[id].marks &= static_cast<uint8_t>(~kSpare);
  }

  // One holder less for each, in the order in which they should be evicted; what is empty of later runs goes first. In
  // one run null blocks are passed over. Answers the place of the first that has no holder left, and nothing has changed
  // then; otherwise how many ids there are.
  size_t free(Ids ids, Runs runs);

  // Forget every name; false, and nothing changes, while any block is held.
  bool clear();

  // These blocks lose their names; the free ones go to the front of the queue. Ids of named blocks, rising.
  void forget(const std::vector<uint32_t>& ids, Dropped* dropped);

  // Throw Broken with the number of the first broken invariant. O(blocks).
  void check();

 private:
  friend class Dependents;
  friend struct Spoiler;
  static constexpr size_t kAhead = 32;

  static std::string text(const char* before, int64_t id, const char* after) {
    return before + std::to_string(id) + after;
  }

  uint64_t place(const Name& name, unsigned group) const { return secrets().place(secrets().fold(name), group); }

  bool carries(uint32_t id, const Name& name, unsigned group) const {
    return names_[id] == name && (num_groups_ == 1 || queue_[id].group == group);
  }

  uint32_t find_at(uint64_t place, const Name& name, unsigned group) const {
    return table_.find(place, [&](uint32_t id) { return carries(id, name, group); });
  }

  // What a few evictions need: all of it is on its way before the first of them waits.
  void look_ahead(Ids ids, uint64_t* folds) const {
    for (const int32_t id : ids) {
      __builtin_prefetch(&names_[id], 1);
      if (queue_[id].has(kNamed)) table_.prefetch(queue_[id].home);
    }
    for (size_t i = 0; i < ids.size; i++) {
      const uint32_t id = ids[i];
      if (!queue_[id].has(kNamed)) continue;
      folds[i] = secrets().fold(names_[id]);
      recent_[queue_[id].group].prefetch(folds[i]);
    }
  }

  // Where the next few names will stand.
  void find_room(Names names, size_t from, unsigned group) {
    const size_t stop = from + kAhead < names.size ? from + kAhead : names.size;
    for (size_t i = from; i < stop; i++) {
      place_of_next_[i - from] = place(names[i], group);
      table_.prefetch(NameTable::home_of(place_of_next_[i - from]));
    }
  }

  size_t let_go(Ids ids, Runs runs, uint32_t* idle, size_t& num_idle);
  void add_free(const uint32_t* idle, size_t count, Runs runs);
  void add(uint32_t id, const Name& name, uint64_t place, unsigned group);
  void note(uint32_t id, const Parent& parent);
  bool drop(uint32_t id, Dropped* dropped);
  void add_copy(uint32_t found, uint32_t id);
  void pass_on(uint32_t id);
  uint32_t check_copies(uint32_t found) const;

  const uint32_t num_blocks_;
  const unsigned num_groups_;
  const bool is_ranked_;
  uint32_t num_cached_ = 0;
  uint64_t num_evictions_ = 0;
  FreeQueue queue_;
  Zeroed<Name> names_;
  Zeroed<uint64_t> parents_;
  NameTable table_;
  // Where several blocks carry a name: a ring of them, from the one that is found to the youngest.
  struct Neighbours {
    uint32_t older, younger;
  };
  std::unordered_map<uint32_t, Neighbours> copies_;
  std::vector<RecentNames> recent_;
  uint64_t place_of_next_[kAhead];
};

}  // namespace kvpool

#include "pool_names.hpp"
#include "pool_verbs.hpp"
