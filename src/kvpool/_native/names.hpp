// Names of contents in 32 bytes, and keyed numbers that stand for them.
#pragma once
#include <cstdint>
#include <cstring>
#include <random>

namespace kvpool {

struct Name {
  uint8_t bytes[32];
};

inline bool operator==(const Name& one, const Name& other) { return std::memcmp(one.bytes, other.bytes, 32) == 0; }
inline bool operator!=(const Name& one, const Name& other) { return !(one == other); }

inline uint64_t multiply_and_fold(uint64_t one, uint64_t other) {
  const unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Secrets of this process: nobody outside can choose names that meet in one place of a table, or that look like a
// marked number.
struct Secrets {
  uint64_t key[6];
  uint8_t mark[11];

  static Secrets random() {
    std::random_device device;
    const auto next = [&] { return static_cast<uint64_t>(device()) << 32 | device(); };
    Secrets made;
    for (uint64_t& key : made.key) key = next() | 1;
    const uint64_t marks[2] = {next(), next()};
    std::memcpy(made.mark, marks, sizeof made.mark);
    return made;
  }

  // 64 bits that depend on all of a name.
  uint64_t fold(const Name& name) const {
    uint64_t word[4];
    std::memcpy(word, name.bytes, 32);
    const uint64_t sum = multiply_and_fold(word[0] ^ key[0], word[1] ^ key[1]) ^
                         multiply_and_fold(word[2] ^ key[2], word[3] ^ key[3]);
    return multiply_and_fold(sum ^ key[4], 0x9e3779b97f4a7c15u);
  }

  // The same for a name within a group; for group 0 it is the fold itself.
  uint64_t place(uint64_t folded, unsigned group) const { return folded ^ group * key[5]; }
};

inline const Secrets& secrets() {
  static const Secrets made = Secrets::random();
  return made;
}

// Names that are no digests, told from digests by the secret mark: [mark 11][kind 1][value 20].
constexpr size_t kMostOfShort = 20;
enum Kind : uint8_t { kUnsigned = 0x40, kNegative = 0x41 };  // below: so many bytes

// Written where it is to stand: to copy what was just written in pieces would wait for all of them.
inline void mark(Name& name, uint8_t kind, const void* value, size_t length) {
  std::memset(name.bytes + 12, 0, kMostOfShort);
  std::memcpy(name.bytes, secrets().mark, 11);
  name.bytes[11] = kind;
  if (length) std::memcpy(name.bytes + 12, value, length);
}

inline bool is_marked(const Name& name) { return std::memcmp(name.bytes, secrets().mark, 11) == 0; }

}  // namespace kvpool
