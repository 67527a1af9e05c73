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

constexpr uint32_t kShaStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
alignas(64) constexpr uint32_t kShaRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The state after `count` more pieces of 64 bytes.
using Compress = void (*)(uint32_t state[8], const uint8_t* pieces, size_t count);

inline uint32_t read_big(const uint8_t* from) {
  uint32_t value;
  std::memcpy(&value, from, 4);
  return __builtin_bswap32(value);
}

inline uint32_t turn_right(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

inline void compress_portable(uint32_t state[8], const uint8_t* pieces, size_t count) {
  for (; count--; pieces += 64) {
    uint32_t word[64];
    for (int i = 0; i < 16; i++) word[i] = read_big(pieces + 4 * i);
    for (int i = 16; i < 64; i++) {
      const uint32_t x = word[i - 15], y = word[i - 2];
      word[i] = word[i - 16] + (turn_right(x, 7) ^ turn_right(x, 18) ^ x >> 3) + word[i - 7] +
                (turn_right(y, 17) ^ turn_right(y, 19) ^ y >> 10);
    }
    uint32_t v[8];
    std::memcpy(v, state, 32);
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
    for (int i = 0; i < 8; i++) state[i] += v[i];
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

KVPOOL_SHA inline void compress_sha_ni(uint32_t state[8], const uint8_t* pieces, size_t count) {
  __m128i* at = reinterpret_cast<__m128i*>(state);
  const __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(at), 0xB1);
  const __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(at + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; count--; pieces += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i a = read_words(pieces), b = read_words(pieces + 16);
    __m128i c = read_words(pieces + 32), d = read_words(pieces + 48);
    four_rounds(abef, cdgh, a, 0);
    four_rounds(abef, cdgh, b, 1);
    four_rounds(abef, cdgh, c, 2);
    four_rounds(abef, cdgh, d, 3);
#pragma GCC unroll 3
    for (int i = 4; i < 16; i += 4) {
      more_words(a, b, c, d);
      four_rounds(abef, cdgh, a, i);
      more_words(b, c, d, a);
      four_rounds(abef, cdgh, b, i + 1);
      more_words(c, d, a, b);
      four_rounds(abef, cdgh, c, i + 2);
      more_words(d, a, b, c);
      four_rounds(abef, cdgh, d, i + 3);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i front = _mm_shuffle_epi32(abef, 0x1B), back = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(at, _mm_blend_epi16(front, back, 0xF0));
  _mm_storeu_si128(at + 1, _mm_alignr_epi8(back, front, 8));
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

KVPOOL_SHA inline void compress_armv8(uint32_t state[8], const uint8_t* pieces, size_t count) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count--; pieces += 64) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; i++) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(pieces + 16 * i)));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const uint32x4_t sum = vaddq_u32(w[i & 3], vld1q_u32(kShaRound + 4 * i)), kept = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, kept, sum);
      const uint32x4_t next = vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]);
      w[i & 3] = vsha256su1q_u32(next, w[(i + 2) & 3], w[(i + 3) & 3]);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
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

struct Sha {
  const char* name;   // of the instructions; "none" where the processor has no such
  Compress compress;  // the portable one where it has none
};

inline Sha find_sha() {
#if defined(__x86_64__)
  if (has_sha_ni()) return {"sha-ni", compress_sha_ni};
#elif defined(__aarch64__)
  if (has_armv8_sha2()) return {"armv8-sha2", compress_armv8};
#endif
  return {"none", compress_portable};
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

// The digest of a padded message.
inline void digest(Compress compress, const uint8_t* message, size_t pieces, uint8_t out[32]) {
  uint32_t state[8];
  std::memcpy(state, kShaStart, 32);
  compress(state, message, pieces);
  for (int i = 0; i < 8; i++) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(out + 4 * i, &word, 4);
  }
}

}  // namespace kvpool
