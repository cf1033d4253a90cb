// float16 (IEEE 754 binary16) as float32: every value of it is exactly one of these.
#pragma once

#include <cstdint>
#include <cstring>

namespace xncaps {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;

  // Zero and subnormals have no leading 1: they are multiples of 2^-24, which float32 holds.
  if (exponent == 0) {
    const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -size : size;
  }
  // The exponent's offset is 15 here and 127 there; all ones stand for infinity and NaN in both.
  const uint32_t wide = exponent == 0x1fu ? 0xffu : exponent + (127u - 15u);
  const uint32_t bits = sign | wide << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace xncaps
