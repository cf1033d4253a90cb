// exp(a) as 2^n * 2^r: n is a * kLog2OfE rounded to a whole number, and r what is left of it.
#pragma once

namespace xncaps {

constexpr float kLog2OfE = 1.44269504f;

// 2^r = the sum of kPowerOf2[k] * r^k for r from -1/2 to 1/2, within 2e-7.
constexpr float kPowerOf2[6] = {1.0f,          0.693147004f,   0.240222424f,
                                0.0555073358f, 0.00967151299f, 0.00132647273f};

}  // namespace xncaps
