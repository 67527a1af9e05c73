// Which block is found under a name: a hash table of 4 bytes an entry, one cache line a bucket.
//
// Owns: the entries. Knows nothing of: names and holders; the pool compares names.
#pragma once
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zeroed.hpp"

namespace kvpool {

// An entry is a block id and, in the bits that ids of this pool do not need, a tag from the name's place. A bucket that
// was full sends entries on to the next, and counts them, so that a search knows when to stop and nothing ever moves.
class NameTable {
 public:
  explicit NameTable(uint32_t num_blocks)
      : id_bits_(32 - __builtin_clz(num_blocks - 1)), num_buckets_(num_blocks / kUsual + 1), buckets_(num_buckets_) {}

  // The high half of a place says which bucket, the low half gives the tag.
  static uint32_t home_of(uint64_t place) { return static_cast<uint32_t>(place >> 32); }

  void prefetch(uint32_t home) const { __builtin_prefetch(&buckets_[bucket_of(home)], 1); }

  // The first entry with this tag that `is_it`, or 0.
  template <class IsIt>
  uint32_t find(uint64_t place, IsIt is_it) const {
    size_t at = bucket_of(home_of(place));
    for (size_t left = num_buckets_; left--; at = after(at)) {
      const Bucket& bucket = buckets_[at];
      for (uint32_t same = same_tags(bucket, place); same; same &= same - 1) {
        const uint32_t id = bucket.entries[__builtin_ctz(same)] & id_mask();
        if (is_it(id)) return id;
      }
      if (!bucket.num_sent_on()) return 0;
    }
    return 0;
  }

  // A block that `find` would probably compare; 0 when there is none in the first bucket.
  uint32_t candidate(uint64_t place) const {
    const Bucket& bucket = buckets_[bucket_of(home_of(place))];
    const uint32_t same = same_tags(bucket, place);
    return same ? bucket.entries[__builtin_ctz(same)] & id_mask() : 0;
  }

  void add(uint64_t place, uint32_t id) {
    size_t at = bucket_of(home_of(place));
    for (; buckets_[at].count() == kEntries; at = after(at)) buckets_[at].control += kSentOn;
    Bucket& bucket = buckets_[at];
    bucket.entries[bucket.count()] = tag_of(place) | id;
    bucket.control++;
  }

  void remove(uint32_t home, uint32_t id) {
    size_t at = bucket_of(home);
    uint32_t* entry;
    for (; !(entry = entry_of(buckets_[at], id)); at = after(at)) buckets_[at].control -= kSentOn;
    Bucket& bucket = buckets_[at];
    bucket.control--;
    *entry = bucket.entries[bucket.count()];
  }

  // Another block with the same name is found from now on.
  void replace(uint32_t home, uint32_t id, uint32_t other) {
    size_t at = bucket_of(home);
    uint32_t* entry;
    for (; !(entry = entry_of(buckets_[at], id)); at = after(at)) {
    }
    *entry = (*entry & ~id_mask()) | other;
  }

  // How many buckets an entry passes until its own; all of them where it is not there.
  size_t distance(uint32_t home, uint32_t id) {
    size_t at = bucket_of(home), passed = 0;
    for (; passed < num_buckets_ && !entry_of(buckets_[at], id); at = after(at)) passed++;
    return passed;
  }

  size_t num_buckets() const { return num_buckets_; }
  size_t size() const {
    size_t sum = 0;
    for (size_t at = 0; at < num_buckets_; at++) sum += buckets_[at].count();
    return sum;
  }
  size_t num_sent_on() const {
    size_t sum = 0;
    for (size_t at = 0; at < num_buckets_; at++) sum += buckets_[at].num_sent_on();
    return sum;
  }
  size_t bytes() const { return buckets_.bytes(); }

  void clear() {
    for (size_t at = 0; at < num_buckets_; at++)
      if (buckets_[at].control) buckets_[at].control = 0;
  }

 private:
  static constexpr unsigned kEntries = 15;
  static constexpr unsigned kUsual = 12;  // entries a bucket when all blocks have names
  static constexpr uint32_t kSentOn = 16;

  struct alignas(64) Bucket {
    uint32_t entries[kEntries];
    uint32_t control;  // how many entries; above 4 bits, how many were sent on

    unsigned count() const { return control & 15; }
    uint32_t num_sent_on() const { return control >> 4; }
  };

  uint32_t id_mask() const { return ~uint32_t{0} >> (32 - id_bits_); }
  uint32_t tag_of(uint64_t place) const { return static_cast<uint32_t>(place) & ~id_mask(); }
  size_t bucket_of(uint32_t home) const { return static_cast<uint64_t>(home) * num_buckets_ >> 32; }
  size_t after(size_t bucket) const { return bucket + 1 == num_buckets_ ? 0 : bucket + 1; }

  // A bit for each entry with the tag of the place.
  uint32_t same_tags(const Bucket& bucket, uint64_t place) const {
    const uint32_t used = (1u << bucket.count()) - 1;
#if defined(__SSE2__)
    const __m128i tag = _mm_set1_epi32(tag_of(place)), mask = _mm_set1_epi32(~id_mask());
    const __m128i* from = reinterpret_cast<const __m128i*>(bucket.entries);
    __m128i same[4];
    for (int i = 0; i < 4; i++) same[i] = _mm_cmpeq_epi32(_mm_and_si128(_mm_load_si128(from + i), mask), tag);
    const __m128i low = _mm_packs_epi32(same[0], same[1]), high = _mm_packs_epi32(same[2], same[3]);
    return _mm_movemask_epi8(_mm_packs_epi16(low, high)) & used;
#else
    uint32_t same = 0;
    for (unsigned i = 0; i < kEntries; i++) same |= (((bucket.entries[i] ^ tag_of(place)) & ~id_mask()) == 0) << i;
    return same & used;
#endif
  }

  uint32_t* entry_of(Bucket& bucket, uint32_t id) const {
    for (unsigned i = 0; i < bucket.count(); i++)
      if ((bucket.entries[i] & id_mask()) == id) return &bucket.entries[i];
    return nullptr;
  }

  const unsigned id_bits_;
  const size_t num_buckets_;
  Zeroed<Bucket> buckets_;
};

}  // namespace kvpool
