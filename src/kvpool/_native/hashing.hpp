// The names of blocks: SHA-256 over canonical CBOR of [parent name, [token ids], extra keys or null].
//
// Knows nothing of: Python, the pool, what extra keys are made of (they come encoded).
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "sha256.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "written for little-endian machines");

namespace kvpool {

constexpr uint8_t kArray = 0x80;
constexpr size_t kMostOfToken = 5;  // bytes of a token id below 2^32
constexpr size_t kStart = 35;       // an array of 3, the first of them 32 bytes: a name
constexpr size_t kSlack = 8;        // what `put_number` may write behind its end

// Write a CBOR head with its value, and answer the end of it. Writes 8 bytes in any case.
//
// Without a branch: tokens of mixed width would cost a wrong guess each.
inline uint8_t* put_number(uint8_t* to, uint32_t value, uint8_t kind = 0) {
  static constexpr uint8_t kWidth[4] = {1, 2, 3, 5}, kCode[4] = {0, 24, 25, 26}, kUnused[4] = {24, 24, 16, 0};
  const unsigned size = (value > 23) + (value > 0xff) + (value > 0xffff);
  const uint64_t big = __builtin_bswap32(value) >> kUnused[size];
  const uint64_t item = (kind | kCode[size]) | big << (size ? 8 : 0);
  std::memcpy(to, &item, 8);
  return to + kWidth[size];
}

// The tokens of one block as CBOR writes them, without the head of the list. Answers the end.
template <class Token>
inline uint8_t* put_tokens(uint8_t* to, const Token* tokens, size_t count) {
  for (size_t i = 0; i < count; i++) to = put_number(to, static_cast<uint32_t>(tokens[i]));
  return to;
}

struct Encoded {
  const uint8_t* bytes = nullptr;  // nullptr: the block has none
  size_t length = 0;
};

// A block that follows no other of its call. Its tokens fit into 32 bits.
struct Single {
  const uint8_t* parent;
  const int64_t* tokens;
  Encoded extra;
  uint8_t* out;
};

// Hashes blocks of one size.
class BlockMessages {
 public:
  explicit BlockMessages(uint32_t block_size, const Sha& with = sha()) : block_size_(block_size), sha_(with) {}

  // The names of `count` blocks after the one named `parent`. `extras` has an item a block, or is nullptr.
  void names(const uint8_t* parent, const uint32_t* tokens, size_t count, const Encoded* extras, uint8_t* out) {
    const auto extra_of = [&](size_t at) { return extras ? extras[at] : Encoded{}; };
    const auto write_at = [&](size_t at) { write(at % 2, tokens + at * block_size_, extra_of(at), out + 32 * at); };
    if (!count) return;  // and no room is needed, however large a block is
    make_room(2, longest(extras ? count : 0, extra_of));
    write_at(0);
    for (size_t at = 0; at < count; at++) {
      // One block ahead: hashing waits for itself, and this fills its pauses; and what was written a while ago is
      // read in wider pieces without waiting.
      if (at + 1 < count) write_at(at + 1);
      put_parent(at % 2, parent);
      digest(sha_, messages_[at % 2]);
      parent = messages_[at % 2].out;
    }
  }

  // The names of blocks that do not follow one another: two of them are hashed side by side.
  void names(const Single* blocks, size_t count) {
    if (!count) return;
    make_room(kSome, longest(count, [&](size_t at) { return blocks[at].extra; }));
    for (size_t first = 0; first < count; first += kSome) {
      const size_t some = count - first < kSome ? count - first : kSome;
      for (size_t i = 0; i < some; i++) {
        const Single& block = blocks[first + i];
        write(i, block.tokens, block.extra, block.out);
        put_parent(i, block.parent);
      }
      for (size_t i = 0; i + 1 < some; i += 2) digest(sha_, messages_[i], messages_[i + 1]);
      if (some % 2) digest(sha_, messages_[some - 1]);
    }
  }

  // The name of one block whose tokens are encoded already.
  void name(const uint8_t* parent, Encoded tokens, Encoded extra, uint8_t* out) {
    const size_t most = kStart + kMostOfToken + kSlack + tokens.length + extra.length + 1;
    grow(64 * num_pieces(most));
    uint8_t* end = put_number(start(buffer_.data()), block_size_, kArray);
    end = put_bytes(end, tokens);
    const size_t pieces = finish(buffer_.data(), end, extra);
    std::memcpy(buffer_.data() + 3, parent, 32);
    digest(sha_, {buffer_.data(), pieces, out});
  }

 private:
  static constexpr size_t kSome = 8;

  static uint8_t* start(uint8_t* message) {
    message[0] = kArray | 3, message[1] = 0x58, message[2] = 32;
    return message + kStart;
  }

  static uint8_t* put_bytes(uint8_t* to, Encoded item) {
    if (item.length) std::memcpy(to, item.bytes, item.length);
    return to + item.length;
  }

  static size_t finish(uint8_t* message, uint8_t* end, Encoded extra) {
    if (extra.bytes) {
      end = put_bytes(end, extra);
    } else {
      *end++ = 0xf6;  // null
    }
    const size_t length = end - message;
    pad(message, length);
    return num_pieces(length);
  }

  // Message `i` of those in the buffer: everything but the parent.
  template <class Token>
  void write(size_t i, const Token* tokens, Encoded extra, uint8_t* out) {
    uint8_t* message = buffer_.data() + i * room_;
    uint8_t* end = put_number(start(message), block_size_, kArray);
    messages_[i] = {message, finish(message, put_tokens(end, tokens, block_size_), extra), out};
  }

  void put_parent(size_t i, const uint8_t* parent) { std::memcpy(buffer_.data() + i * room_ + 3, parent, 32); }

  // The most bytes that extra keys, or null for none, take.
  template <class ExtraOf>
  static size_t longest(size_t count, ExtraOf extra_of) {
    size_t most = 1;
    for (size_t at = 0; at < count; at++) {
      const size_t length = extra_of(at).length;
      most = length > most ? length : most;
    }
    return most;
  }

  void make_room(size_t num_messages, size_t longest_extra) {
    room_ = 64 * num_pieces(kStart + kMostOfToken * (1 + size_t{block_size_}) + kSlack + longest_extra);
    grow(num_messages * room_);
  }

  void grow(size_t size) {
    if (buffer_.size() < size) buffer_.resize(size);
  }

  const uint32_t block_size_;
  const Sha& sha_;
  std::vector<uint8_t> buffer_;
  size_t room_ = 0;  // in the buffer, for each message
  Message messages_[kSome];
};

}  // namespace kvpool
