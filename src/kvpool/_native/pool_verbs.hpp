// The parts of Pool that let go of blocks, and prove that all is in order.
#pragma once
#include <memory>

#include "pool.hpp"

namespace kvpool {

inline size_t Pool::free(Ids ids, Runs runs) {
  constexpr size_t kFew = 512;
  uint32_t few[kFew];
  std::unique_ptr<uint32_t[]> many(ids.size > kFew ? new uint32_t[ids.size] : nullptr);
  uint32_t* idle = many ? many.get() : few;
  size_t num_idle = 0;
  const size_t done = let_go(ids, runs, idle, num_idle);
  if (done == ids.size) add_free(idle, num_idle, runs);
  return done;
}

// Count holders down; `idle` are the blocks that have none any more, and the null block between two runs.
inline size_t Pool::let_go(Ids ids, Runs runs, uint32_t* idle, size_t& num_idle) {
  for (size_t i = 0; i < ids.size; i++) {
    const uint32_t ahead = i + kAhead < ids.size ? static_cast<uint32_t>(ids[i + kAhead]) : 0;
    queue_.prefetch(ahead < num_blocks_ ? ahead : 0);
    const uint32_t id = static_cast<uint32_t>(ids[i]);
    if (id == kNullBlock && runs != Runs::kEach) {
      if (runs == Runs::kParted) idle[num_idle++] = kNullBlock;
      continue;
    }
    // A block keeps its mark until it is in the queue: here, one that nobody holds any more is not free yet.
    if (id >= num_blocks_ || !queue_[id].has(kHeld) || !queue_[id].before) {
      for (size_t k = 0; k < i; k++) queue_[ids[k]].before += ids[k] != 0;
      return i;
    }
    if (--queue_[id].before == 0) idle[num_idle++] = id;
  }
  return ids.size;
}

inline void Pool::add_free(const uint32_t* idle, size_t count, Runs runs) {
  uint32_t behind = kNullBlock;
  for (size_t i = 0; i < count; i++) {
    const uint32_t id = idle[i];
    if (id == kNullBlock) {
      behind = kNullBlock;
    } else if (!queue_[id].has(kNamed)) {
      queue_.add_empty(behind, id);
      if (runs != Runs::kEach) behind = id;
    } else {
      num_cached_++;
      if (queue_[id].has(kSpare)) {
        queue_.add_spare(id);
      } else {
        queue_.add_cached(id);
      }
    }
  }
}

inline void require_that(bool holds, const std::string& otherwise) {
  if (!holds) throw Broken(otherwise);
}

// How many blocks carry the name of this one.
inline uint32_t Pool::check_copies(uint32_t found) const {
  uint32_t count = 0;
  for (uint32_t id = found; count == 0 || id != found; count++) {
    const auto own = copies_.find(id);
    const bool is_one = own != copies_.end() && queue_[id].has(kNamed) && queue_[id].has(kCopy) == (id != found) &&
                        queue_[id].group == queue_[found].group && names_[id] == names_[found];
    const auto younger = is_one ? copies_.find(own->second.younger) : copies_.end();
    require_that(younger != copies_.end() && younger->second.older == id && count < copies_.size(),
                 "invariant 3: the index and the blocks' names differ");
    id = own->second.younger;
  }
  require_that(count > 1, "invariant 3: an empty list of copies");
  return count;
}

inline void Pool::check() {
  std::vector<bool> is_free(num_blocks_);
  uint32_t length = 0, cached = 0;
  bool has_border = queue_.border() == kNullBlock;
  for (uint32_t back = kNullBlock, id = queue_.next(kNullBlock);; back = id, id = queue_.next(id)) {
    require_that(id < num_blocks_, "invariant 2: the free queue is broken");
    require_that(queue_.previous(id) == back, "invariant 2: a link is one-way");
    if (id == kNullBlock) break;
    require_that(!is_free[id] && length < queue_.size(), "invariant 2: the free queue is broken");
    is_free[id] = true;
    has_border |= id == queue_.border();
    cached += queue_[id].has(kNamed);
    length++;
  }
  require_that(length == queue_.size(), "invariant 2: the free queue is broken");
  require_that(!is_ranked_ || has_border, text("invariant 2: block ", queue_.border(), " is no border"));
  require_that(num_cached_ == cached, text("invariant 1: ", num_cached_, " blocks are counted as cached, ") +
                                          std::to_string(cached) + " are");
  size_t num_found = 0, num_copies = 0;
  for (uint32_t id = 1; id < num_blocks_; id++) {
    const Block& block = queue_[id];
    require_that(is_free[id] != block.has(kHeld), text("invariant 2: block ", id, ""));
    require_that(!block.has(kHeld) || block.before, text("invariant 1: block ", id, " has 0 holders"));
    require_that(!block.has(kSeen), text("block ", id, " was left marked"));
    if (!block.has(kNamed)) continue;
    const uint64_t its_place = place(names_[id], block.group);
    const uint32_t found = find_at(its_place, names_[id], block.group);
    require_that(found && block.home == NameTable::home_of(its_place) && block.has(kCopy) == (found != id) &&
                     !queue_[found].has(kCopy) && copies_.count(id) == block.has(kCopy | kHasCopies),
                 "invariant 3: the index and the blocks' names differ");
    num_found += found == id;
    if (block.has(kHasCopies)) num_copies += check_copies(id);
  }
  require_that(num_found == table_.size() && num_copies == copies_.size(),
               "invariant 3: the index and the blocks' names differ");
  require_that(!queue_[kNullBlock].has(kHeld), "invariant 5: the null block is held");
  require_that(!queue_[kNullBlock].has(kNamed), "invariant 5: the null block has a name");
}

}  // namespace kvpool
