// SHA-256 with the processor's own instructions, found at run time; a portable one for machines without, and for tests.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace kvpool {

alignas(64) constexpr uint32_t kShaRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

struct State {
  uint32_t words[8];
};

constexpr State kShaStart = {
    {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};

// The states of one message, or of several side by side, after `count` more pieces of 64 bytes of each.
using Compress = void (*)(State* states, const uint8_t* const* pieces, size_t count);

inline uint32_t read_big(const uint8_t* from) {
  uint32_t value;
  std::memcpy(&value, from, 4);
  return __builtin_bswap32(value);
}

inline uint32_t turn_right(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

inline void compress_portable(State* state, const uint8_t* const* pieces, size_t count) {
  for (const uint8_t* piece = *pieces; count--; piece += 64) {
    uint32_t word[64];
    for (int i = 0; i < 16; i++) word[i] = read_big(piece + 4 * i);
    for (int i = 16; i < 64; i++) {
      const uint32_t x = word[i - 15], y = word[i - 2];
      word[i] = word[i - 16] + (turn_right(x, 7) ^ turn_right(x, 18) ^ x >> 3) + word[i - 7] +
                (turn_right(y, 17) ^ turn_right(y, 19) ^ y >> 10);
    }
    uint32_t v[8];
    std::memcpy(v, state->words, 32);
    for (int i = 0; i < 64; i++) {
      const uint32_t a = v[0], e = v[4];
      const uint32_t one = v[7] + (turn_right(e, 6) ^ turn_right(e, 11) ^ turn_right(e, 25)) +
                           ((e & v[5]) ^ (~e & v[6])) + kShaRound[i] + word[i];
      const uint32_t two = (turn_right(a, 2) ^ turn_right(a, 13) ^ turn_right(a, 22)) +
                           ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      std::memmove(v + 1, v, 28);
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state->words[i] += v[i];
  }
}

#if defined(__x86_64__)
#define KVPOOL_SHA __attribute__((target("sha,sse4.1,ssse3")))

// Four rounds with the message words `w`.
KVPOOL_SHA inline void four_rounds(__m128i& abef, __m128i& cdgh, __m128i w, int index) {
  const __m128i sum = _mm_add_epi32(w, _mm_load_si128(reinterpret_cast<const __m128i*>(kShaRound + 4 * index)));
  cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
  abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
}

// The four message words that follow the sixteen in `oldest` .. `newest`, in place of the oldest.
KVPOOL_SHA inline void more_words(__m128i& oldest, __m128i second, __m128i third, __m128i newest) {
  const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(oldest, second), _mm_alignr_epi8(newest, third, 4));
  oldest = _mm_sha256msg2_epu32(sum, newest);
}

KVPOOL_SHA inline __m128i read_words(const uint8_t* from) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), big_endian);
}

// A round waits for the one before it: of two messages side by side, each fills the other's pauses.
template <int kLanes>
KVPOOL_SHA inline void compress_sha_ni(State* states, const uint8_t* const* pieces, size_t count) {
  __m128i abef[kLanes], cdgh[kLanes];
  for (int lane = 0; lane < kLanes; lane++) {
    const __m128i* at = reinterpret_cast<const __m128i*>(states[lane].words);
    const __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(at), 0xB1);
    const __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(at + 1), 0x1B);
    abef[lane] = _mm_alignr_epi8(low, high, 8), cdgh[lane] = _mm_blend_epi16(high, low, 0xF0);
  }
  for (size_t done = 0; done < count; done++) {
    __m128i abef_before[kLanes], cdgh_before[kLanes], words[kLanes][4];
    for (int lane = 0; lane < kLanes; lane++) {
      abef_before[lane] = abef[lane], cdgh_before[lane] = cdgh[lane];
      for (int i = 0; i < 4; i++) words[lane][i] = read_words(pieces[lane] + 64 * done + 16 * i);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
#pragma GCC unroll 2
      for (int lane = 0; lane < kLanes; lane++) {
        __m128i* w = words[lane];
        if (i > 3) more_words(w[i & 3], w[(i + 1) & 3], w[(i + 2) & 3], w[(i + 3) & 3]);
        four_rounds(abef[lane], cdgh[lane], w[i & 3], i);
      }
    for (int lane = 0; lane < kLanes; lane++) {
      abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
      cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
    }
  }
  for (int lane = 0; lane < kLanes; lane++) {
    __m128i* at = reinterpret_cast<__m128i*>(states[lane].words);
    const __m128i front = _mm_shuffle_epi32(abef[lane], 0x1B), back = _mm_shuffle_epi32(cdgh[lane], 0xB1);
    _mm_storeu_si128(at, _mm_blend_epi16(front, back, 0xF0));
    _mm_storeu_si128(at + 1, _mm_alignr_epi8(back, front, 8));
  }
}

inline bool has_sha_ni() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 29 & 1)) return false;
  return __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}
#elif defined(__aarch64__)
#if defined(__clang__)
#define KVPOOL_SHA __attribute__((target("sha2")))
#else
#define KVPOOL_SHA __attribute__((target("+crypto")))
#endif

template <int kLanes>
KVPOOL_SHA inline void compress_armv8(State* states, const uint8_t* const* pieces, size_t count) {
  uint32x4_t abcd[kLanes], efgh[kLanes];
  for (int lane = 0; lane < kLanes; lane++)
    abcd[lane] = vld1q_u32(states[lane].words), efgh[lane] = vld1q_u32(states[lane].words + 4);
  for (size_t done = 0; done < count; done++) {
    uint32x4_t abcd_before[kLanes], efgh_before[kLanes], words[kLanes][4];
    for (int lane = 0; lane < kLanes; lane++) {
      abcd_before[lane] = abcd[lane], efgh_before[lane] = efgh[lane];
      for (int i = 0; i < 4; i++)
        words[lane][i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(pieces[lane] + 64 * done + 16 * i)));
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
#pragma GCC unroll 2
      for (int lane = 0; lane < kLanes; lane++) {
        uint32x4_t* w = words[lane];
        const uint32x4_t sum = vaddq_u32(w[i & 3], vld1q_u32(kShaRound + 4 * i)), kept = abcd[lane];
        abcd[lane] = vsha256hq_u32(abcd[lane], efgh[lane], sum);
        efgh[lane] = vsha256h2q_u32(efgh[lane], kept, sum);
        const uint32x4_t next = vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]);
        w[i & 3] = vsha256su1q_u32(next, w[(i + 2) & 3], w[(i + 3) & 3]);
      }
    for (int lane = 0; lane < kLanes; lane++) {
      abcd[lane] = vaddq_u32(abcd[lane], abcd_before[lane]);
      efgh[lane] = vaddq_u32(efgh[lane], efgh_before[lane]);
    }
  }
  for (int lane = 0; lane < kLanes; lane++)
    vst1q_u32(states[lane].words, abcd[lane]), vst1q_u32(states[lane].words + 4, efgh[lane]);
}

inline bool has_armv8_sha2() {
#if defined(__APPLE__) || defined(__ARM_FEATURE_SHA2)
  return true;
#elif defined(__linux__)
  return getauxval(AT_HWCAP) >> 6 & 1;  // HWCAP_SHA2
#else
  return false;
#endif
}
#endif

inline void compress_portable_two(State* states, const uint8_t* const* pieces, size_t count) {
  for (int lane = 0; lane < 2; lane++) compress_portable(states + lane, pieces + lane, count);
}

struct Sha {
  const char* name;  // of the instructions; "none" where the processor has no such
  Compress one, two; // how many messages they go on with
};

constexpr Sha kPortableSha = {"none", compress_portable, compress_portable_two};

inline Sha find_sha() {
#if defined(__x86_64__)
  if (has_sha_ni()) return {"sha-ni", compress_sha_ni<1>, compress_sha_ni<2>};
#elif defined(__aarch64__)
  if (has_armv8_sha2()) return {"armv8-sha2", compress_armv8<1>, compress_armv8<2>};
#endif
  return kPortableSha;
}

inline const Sha& sha() {
  static const Sha found = find_sha();
  return found;
}

// How many pieces a message of so many bytes is padded to.
inline size_t num_pieces(size_t length) { return (length + 9 + 63) / 64; }

// Write the padding behind a message; there is room for all its pieces.
inline void pad(uint8_t* message, size_t length) {
  const size_t end = 64 * num_pieces(length);
  message[length] = 0x80;
  std::memset(message + length + 1, 0, end - length - 9);
  const uint64_t bits = __builtin_bswap64(static_cast<uint64_t>(length) * 8);
  std::memcpy(message + end - 8, &bits, 8);
}

// A padded message, and where its digest goes.
struct Message {
  const uint8_t* bytes;
  size_t num_pieces;
  uint8_t* out;
};

inline void write_digest(const State& state, uint8_t* out) {
  for (int i = 0; i < 8; i++) {
    const uint32_t word = __builtin_bswap32(state.words[i]);
    std::memcpy(out + 4 * i, &word, 4);
  }
}

inline void digest(const Sha& sha, const Message& message) {
  State state = kShaStart;
  sha.one(&state, &message.bytes, message.num_pieces);
  write_digest(state, message.out);
}

// Of two that do not depend on each other.
inline void digest(const Sha& sha, const Message& first, const Message& second) {
  State states[2] = {kShaStart, kShaStart};
  const uint8_t* pieces[2] = {first.bytes, second.bytes};
  const size_t common = first.num_pieces < second.num_pieces ? first.num_pieces : second.num_pieces;
  sha.two(states, pieces, common);
  for (int i = 0; i < 2; i++) {
    const Message& message = i ? second : first;
    pieces[i] += 64 * common;
    sha.one(states + i, pieces + i, message.num_pieces - common);
    write_digest(states[i], message.out);
  }
}

}  // namespace kvpool
