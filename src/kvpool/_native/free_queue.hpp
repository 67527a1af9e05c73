// The blocks' records, and the free queue through them.
//
// Owns: links, holders, marks of every block; the order of the free ones.
// Knows nothing of: names, what calls are allowed.
#pragma once
#include <cstdint>

#include "zeroed.hpp"

namespace kvpool {

constexpr uint32_t kNullBlock = 0;

enum Mark : uint8_t {
  kHeld = 1,        // not in the free queue; `before` counts holders
  kNamed = 2,
  kSpare = 4,       // evicted before others with a name
  kCopy = 8,        // an older block is found under its name
  kHasCopies = 16,  // it is found, and others carry its name
  kParent = 32,     // its parent is noted
  kLineage = 64,    // what it depends on is noted outside
  kSeen = 128,      // within one call
};

struct Block {
  uint32_t before;  // free: how far the link back leads, see `FreeQueue`; held: how many hold it
  uint32_t after;
  uint32_t home;    // where its name stands in the table
  uint8_t group;
  uint8_t marks;
  uint16_t unused;

  bool has(uint8_t marks_) const { return marks & marks_; }
};
static_assert(sizeof(Block) == 16, "a quarter of a cache line");

// Free blocks, those to be reused first in front: empty ones, spare ones, others with a name; a doubly linked round
// through the null block. A link is kept as the distance to what a new pool has there, so that a new pool is all zeros
// and costs nothing to make, however large it is.
//
// The border is the last block that is empty or spare; the null block while there is none. Without spare blocks nobody
// asks for it.
class FreeQueue {
 public:
  explicit FreeQueue(uint32_t num_blocks)
      : num_blocks_(num_blocks), length_(num_blocks - 1), border_(num_blocks - 1), blocks_(num_blocks) {
    link(num_blocks - 1, kNullBlock);
  }

  Block& operator[](uint32_t id) { return blocks_[id]; }
  const Block& operator[](uint32_t id) const { return blocks_[id]; }
  uint32_t num_blocks() const { return num_blocks_; }
  uint32_t size() const { return length_; }
  uint32_t border() const { return border_; }
  size_t bytes() const { return blocks_.bytes(); }
  uint32_t next(uint32_t id) const { return id + 1 + blocks_[id].after; }
  uint32_t previous(uint32_t id) const { return id - 1 + blocks_[id].before; }
  void prefetch(uint32_t id) const { __builtin_prefetch(&blocks_[id], 1); }

  // The front blocks, in order, each with one holder now. The caller has seen that there are so many.
  void take(uint32_t count, uint32_t* taken) {
    uint32_t id = kNullBlock;
    bool is_past_border = false;
    for (uint32_t i = 0; i < count; i++) {
      taken[i] = id = next(id);
      hold(id);
      is_past_border |= id == border_;
    }
    link(kNullBlock, next(id));
    length_ -= count;
    if (is_past_border) border_ = kNullBlock;
  }

  // A free block found a holder, wherever it stands.
  void remove(uint32_t id) {
    detach(id);
    hold(id);
  }

  // A free block goes to another place in the queue, behind `behind`.
  void detach(uint32_t id) {
    const uint32_t back = previous(id);
    if (id == border_) border_ = back;
    link(back, next(id));
    length_--;
  }

  // These add a block that nobody holds.
  void add_empty(uint32_t behind, uint32_t id) {
    insert(behind, id);
    if (border_ == behind) border_ = id;
  }

  void add_spare(uint32_t id) {
    insert(border_, id);
    border_ = id;
  }

  void add_cached(uint32_t id) { place(previous(kNullBlock), id, kNullBlock); }

 private:
  void hold(uint32_t id) {
    blocks_[id].marks |= kHeld;
    blocks_[id].before = 1;
  }

  void insert(uint32_t behind, uint32_t id) { place(behind, id, next(behind)); }

  void place(uint32_t behind, uint32_t id, uint32_t front) {
    blocks_[id].marks &= static_cast<uint8_t>(~kHeld);
    link(behind, id);
    link(id, front);
    length_++;
  }

  void link(uint32_t back, uint32_t front) {
    blocks_[back].after = front - back - 1;
    blocks_[front].before = back - front + 1;
  }

  const uint32_t num_blocks_;
  uint32_t length_;
  uint32_t border_;
  Zeroed<Block> blocks_;
};

}  // namespace kvpool
