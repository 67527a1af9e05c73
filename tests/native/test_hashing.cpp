// The digests of the core alone: known values, and the processor's instructions against the portable ones.
#include <random>

#include "harness.hpp"
#include "hashing.hpp"

using namespace kvpool;

namespace {

std::string hex(const uint8_t* bytes, size_t count = 32) {
  std::string text;
  char pair[3];
  for (size_t i = 0; i < count; i++) {
    std::snprintf(pair, sizeof pair, "%02x", bytes[i]);
    text += pair;
  }
  return text;
}

std::vector<uint8_t> padded(const std::string& message) {
  std::vector<uint8_t> bytes(64 * num_pieces(message.size()));
  std::copy(message.begin(), message.end(), bytes.begin());
  pad(bytes.data(), message.size());
  return bytes;
}

std::string sha256(const Sha& with, const std::string& message) {
  const std::vector<uint8_t> bytes = padded(message);
  uint8_t out[32];
  digest(with, {bytes.data(), bytes.size() / 64, out});
  return hex(out);
}

std::string letters(std::mt19937& random, size_t count) {
  std::string message(count, ' ');
  for (char& letter : message) letter = static_cast<char>(random());
  return message;
}

std::string encoded(uint32_t value, uint8_t kind = 0) {
  uint8_t bytes[16] = {};
  return hex(bytes, put_number(bytes, value, kind) - bytes);
}

}  // namespace

TEST(published_digests) {
  for (const Sha& with : {kPortableSha, sha()}) {
    REQUIRE(sha256(with, "") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    REQUIRE(sha256(with, "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    REQUIRE(sha256(with, std::string(1000000, 'a')) ==
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

TEST(instructions_and_portable_code_agree) {
  std::mt19937 random(1);
  for (int length = 0; length < 400; length++) {
    const std::string message = letters(random, length);
    REQUIRE(sha256(sha(), message) == sha256(kPortableSha, message));
  }
}

TEST(two_messages_side_by_side) {
  std::mt19937 random(3);
  for (const Sha& with : {kPortableSha, sha()})
    for (int i = 0; i < 200; i++) {
      const std::string one = letters(random, random() % 300), other = letters(random, random() % 300);
      const std::vector<uint8_t> bytes[2] = {padded(one), padded(other)};
      uint8_t out[2][32];
      digest(with, {bytes[0].data(), bytes[0].size() / 64, out[0]}, {bytes[1].data(), bytes[1].size() / 64, out[1]});
      REQUIRE(hex(out[0]) == sha256(kPortableSha, one) && hex(out[1]) == sha256(kPortableSha, other));
    }
}

TEST(numbers_in_their_shortest_form) {
  REQUIRE(encoded(0) == "00" && encoded(23) == "17");
  REQUIRE(encoded(24) == "1818" && encoded(255) == "18ff");
  REQUIRE(encoded(256) == "190100" && encoded(65535) == "19ffff");
  REQUIRE(encoded(65536) == "1a00010000" && encoded(0xffffffff) == "1affffffff");
  REQUIRE(encoded(16, kArray) == "90" && encoded(24, kArray) == "9818" && encoded(300, kArray) == "99012c");
}

TEST(a_published_name) {
  // BlockHasher(16, seed="0"), tokens 0 .. 15.
  const std::string root = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e";
  uint8_t parent[32], name[32];
  for (int i = 0; i < 32; i++) parent[i] = static_cast<uint8_t>(std::stoi(root.substr(2 * i, 2), nullptr, 16));
  uint32_t tokens[16];
  for (uint32_t i = 0; i < 16; i++) tokens[i] = i;
  BlockMessages(16).names(parent, tokens, 1, nullptr, name);
  REQUIRE(hex(name) == "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c");
}

TEST(blocks_in_a_chain_and_singly) {
  std::mt19937 random(2);
  for (const uint32_t size : {1u, 2u, 16u, 23u, 24u, 300u}) {
    const size_t count = 37;
    std::vector<uint32_t> tokens(size * count);
    for (uint32_t& token : tokens) token = random() >> (random() % 32);
    std::vector<uint8_t> keys(500, 0x61), together(32 * count);
    std::vector<Encoded> extras(count);
    for (Encoded& extra : extras)
      if (random() % 2) extra = {keys.data(), random() % keys.size()};
    const uint8_t root[32] = {1};
    BlockMessages messages(size);
    messages.names(root, tokens.data(), count, extras.data(), together.data());
    const uint8_t* parent = root;
    const std::vector<int64_t> wide(tokens.begin(), tokens.end());
    std::vector<uint8_t> singly(32 * count);
    std::vector<Single> singles(count);
    for (size_t i = 0; i < count; i++)
      singles[i] = {i ? &together[32 * (i - 1)] : root, &wide[i * size], extras[i], &singly[32 * i]};
    messages.names(singles.data(), count);
    REQUIRE(singly == together);
    for (size_t i = 0; i < count; i++) {
      std::vector<uint8_t> bytes(kMostOfToken * size + kSlack);
      const uint8_t* end = put_tokens(bytes.data(), &tokens[i * size], size);
      uint8_t name[32];
      messages.name(parent, {bytes.data(), static_cast<size_t>(end - bytes.data())}, extras[i], name);
      REQUIRE(hex(name) == hex(&together[32 * i]));
      parent = &together[32 * i];
    }
  }
}
