// The parts of Pool that give names to blocks and take them away.
#pragma once
#include <algorithm>

#include "pool.hpp"

namespace kvpool {

inline void Pool::require_unnamed(Ids ids) {
  for (const int32_t id : ids) queue_.prefetch(static_cast<uint32_t>(id) < num_blocks_ ? id : 0);
  for (const int32_t id : ids) {
    require(id);
    __builtin_prefetch(&names_[id], 1);
  }
  size_t seen = 0;
  for (; seen < ids.size; seen++) {
    Block& block = queue_[ids[seen]];
    if (block.has(kNamed | kSeen) || !block.has(kHeld)) break;
    block.marks |= kSeen;
  }
  const bool is_named = seen < ids.size && queue_[ids[seen]].has(kNamed | kSeen);
  for (size_t i = 0; i < seen; i++) queue_[ids[i]].marks &= static_cast<uint8_t>(~kSeen);
  if (seen == ids.size) return;
  if (is_named) throw Broken(text("invariant 4: block ", ids[seen], " already has a name"));
  throw Broken(text("invariant 3: block ", ids[seen], " is committed, but nobody holds it"));
}

// A name for a block without one.
inline void Pool::add(uint32_t id, const Name& name, uint64_t place, unsigned group) {
  Block& block = queue_[id];
  const uint32_t found = find_at(place, name, group);
  if (found) {
    add_copy(found, id);
  } else {
    table_.add(place, id);
  }
  names_[id] = name;
  block.home = NameTable::home_of(place);
  if (num_groups_ > 1) block.group = static_cast<uint8_t>(group);
  block.marks = static_cast<uint8_t>((block.marks & kHeld) | kNamed | (found ? kCopy : 0));
}

inline void Pool::add_copy(uint32_t found, uint32_t id) {
  Neighbours& own = copies_[id];
  try {
    Neighbours& oldest = copies_.try_emplace(found, Neighbours{found, found}).first->second;
    own = {oldest.older, found};
    copies_.find(own.older)->second.younger = id;
    oldest.older = id;
  } catch (const std::bad_alloc&) {
    copies_.erase(id);
    throw;
  }
  queue_[found].marks |= kHasCopies;
}

// What a block with a new name depends on.
inline void Pool::note(uint32_t id, const Parent& parent) {
  if (parent.kind == Parent::kNone) return;
  queue_[id].marks |= parent.kind == Parent::kPlain ? kParent : kLineage;
  parents_[id] = parent.folded;
}

// A block gives up its name; whether nobody carries it in its group any more.
inline bool Pool::drop(uint32_t id, Dropped* dropped) {
  Block& block = queue_[id];
  const bool is_gone = !block.has(kCopy | kHasCopies);
  if (is_gone) {
    table_.remove(block.home, id);
  } else {
    pass_on(id);
  }
  block.marks &= static_cast<uint8_t>(kHeld | kSeen);
  if (dropped && is_gone) {
    dropped->names.push_back(names_[id]);
    dropped->group_of_name.push_back(block.group);
  }
  return is_gone;
}

// Others carry this block's name too: where it is the one that is found, the oldest of them takes its place.
inline void Pool::pass_on(uint32_t id) {
  const auto own = copies_.find(id);
  const Neighbours beside = own->second;
  copies_.find(beside.older)->second.younger = beside.younger;
  copies_.find(beside.younger)->second.older = beside.older;
  copies_.erase(own);
  if (queue_[id].has(kHasCopies)) {
    table_.replace(queue_[id].home, id, beside.younger);
    queue_[beside.younger].marks = static_cast<uint8_t>((queue_[beside.younger].marks & ~kCopy) | kHasCopies);
  }
  if (beside.older != beside.younger) return;
  queue_[beside.older].marks &= static_cast<uint8_t>(~kHasCopies);
  copies_.erase(beside.older);
}

inline void Pool::forget(const std::vector<uint32_t>& ids, Dropped* dropped) {
  if (dropped) dropped->reserve_more(ids.size());
  uint32_t num_idle = 0, behind = kNullBlock;
  for (const uint32_t id : ids)
    if (!queue_[id].has(kHeld)) queue_.detach(id);
  for (const uint32_t id : ids) drop(id, dropped);
  for (const uint32_t id : ids) {
    if (queue_[id].has(kHeld)) continue;
    queue_.add_empty(behind, id);
    behind = id;
    num_idle++;
  }
  num_cached_ -= num_idle;
}

inline bool Pool::clear() {
  if (queue_.size() != num_blocks_ - 1) return false;
  table_.clear();
  for (uint32_t id = 1; id < num_blocks_; id++)
    if (queue_[id].marks) queue_[id].marks = 0;
  copies_.clear();
  for (RecentNames& recent : recent_) recent = RecentNames();
  num_cached_ = 0;
  return true;
}

}  // namespace kvpool
