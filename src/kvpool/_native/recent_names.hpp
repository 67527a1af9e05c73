// The names that were evicted lately, as keyed numbers of 64 bits.
#pragma once
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace kvpool {

// A set of numbers that only grows; the open-addressed table is at most half full.
class NumberSet {
 public:
  size_t size() const { return size_ + has_zero_; }

  bool contains(uint64_t number) const {
    if (number == 0) return has_zero_;
    if (slots_.empty()) return false;
    for (size_t at = number & mask();; at = (at + 1) & mask()) {
      if (slots_[at] == number) return true;
      if (slots_[at] == 0) return false;
    }
  }

  void add(uint64_t number) {
    if (number == 0) {
      has_zero_ = true;
      return;
    }
    if (2 * (size_ + 1) > slots_.size()) grow();
    size_ += put(slots_, number);
  }

  void prefetch(uint64_t number) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[number & mask()], 1);
  }

  // Keeps memory for up to `most` numbers only.
  void clear(size_t most) {
    if (slots_.size() > 4 * most) {
      std::vector<uint64_t>().swap(slots_);
    } else {
      slots_.assign(slots_.size(), 0);
    }
    size_ = 0;
    has_zero_ = false;
  }

 private:
  size_t mask() const { return slots_.size() - 1; }

  static bool put(std::vector<uint64_t>& slots, uint64_t number) {
    const size_t mask = slots.size() - 1;
    size_t at = number & mask;
    while (slots[at] && slots[at] != number) at = (at + 1) & mask;
    if (slots[at]) return false;
    slots[at] = number;
    return true;
  }

  void grow() {
    std::vector<uint64_t> larger(slots_.empty() ? 64 : 2 * slots_.size());
    for (const uint64_t number : slots_)
      if (number) put(larger, number);
    slots_.swap(larger);
  }

  std::vector<uint64_t> slots_;
  size_t size_ = 0;
  bool has_zero_ = false;
};

// The last `kLimit` at least, not many more than twice as many, as the Python class of this name.
class RecentNames {
 public:
  static constexpr size_t kLimit = 32768;

  bool contains(uint64_t folded) const { return young_.contains(folded) || old_.contains(folded); }
  void prefetch(uint64_t folded) const { young_.prefetch(folded); }

  // Never fails: without memory for it, a name is forgotten.
  void add(uint64_t folded) noexcept {
    try {
      young_.add(folded);
    } catch (const std::bad_alloc&) {
    }
  }

  // After all names of one call.
  void turn() {
    if (young_.size() < kLimit) return;
    std::swap(young_, old_);
    young_.clear(kLimit);
  }

 private:
  NumberSet young_, old_;
};

}  // namespace kvpool
