// What kernels that use Intel's AMX share (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1,
// chapter 18): a tile has 16 rows of 64 bytes, and one instruction multiplies two and adds to a third.

#ifndef JAXSERVE_PALLAS_KERNELS_NATIVE_AMX_H_
#define JAXSERVE_PALLAS_KERNELS_NATIVE_AMX_H_

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "native/lanes.h"

namespace jaxserve::amx {

constexpr int64_t kSide = 16;  // rows and columns of a tile of sums

// Whether the system lets this process use the tiles' registers; it is asked once.
inline bool Allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

// What was written before is in memory: GCC does not know that the instructions below read it.
INLINE inline void Written() { __asm__ volatile("" ::: "memory"); }

// While this lives, tiles 0 to 5 have so many rows, and 6 and 7, for right factors, all.
struct Tiles {
  explicit Tiles(int64_t num_rows = kSide) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {0, 0, 0, 0, 0, 0, 16, 16};
    } config;
    for (int i = 0; i < 6; ++i) config.rows[i] = static_cast<uint8_t>(num_rows);
    Written();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

}  // namespace jaxserve::amx

#endif  // JAXSERVE_PALLAS_KERNELS_NATIVE_AMX_H_
