// The specification: what every kernel computes, in loops to be read top to bottom. No other kernel
// is right where it differs from this one by more than rounding.
//
// Letters: b batch, i caps_in, j caps_out, d dim_in, e dim_out. Results are float32, as those of
// the PyTorch layers; long sums run in double and are rounded once, so that no order of adding is
// right by definition. Dot products of signs are whole numbers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "half.h"
#include "kernel.h"
#include "layout.h"

namespace xncaps::reference {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Signs = std::vector<int>;

// ---- Binarization: values become signs and a scale. A vector may have a stride. ----

// A sign is +1 above this, else -1.
inline float threshold(Binarizer how, const float* values, int64_t count, int64_t stride = 1) {
  if (how != Binarizer::midrange) return 0.0f;
  float low = values[0], high = values[0];
  for (int64_t k = 0; k < count; ++k) {
    const float value = values[k * stride];
    // Comparisons would pass over a NaN; as a threshold it makes all signs -1.
    if (std::isnan(value)) return value;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return (high + low) / 2;
}

inline Signs signs(Binarizer how, const float* values, int64_t count, int64_t stride = 1) {
  const float middle = threshold(how, values, count, stride);
  Signs result(count);
  for (int64_t k = 0; k < count; ++k) result[k] = values[k * stride] > middle ? 1 : -1;
  return result;
}

inline float mean_abs(const float* values, int64_t count, int64_t stride = 1) {
  double sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += std::fabs(values[k * stride]);
  return static_cast<float>(sum / count);
}

// The gradient that a sign passes on to its value: `grad` times what stands in for the derivative.
// Where that is 0 nothing passes, not even a NaN.
inline double through_sign(Binarizer how, float value, double grad) {
  const double size = std::fabs(value);
  if (!(size <= 1)) return 0;  // outside, or NaN
  return how == Binarizer::approxsign ? grad * (2 - 2 * size) : grad;
}

// The derivative of abs(value), 0 at 0.
inline double slope_of_abs(float value) { return value > 0 ? 1 : value < 0 ? -1 : 0; }

// Bit k of packed signs: bytes in order, in each the lowest bit first.
inline int unpack(const uint8_t* bytes, int64_t k) { return bytes[k / 8] >> (k % 8) & 1 ? 1 : -1; }

// ---- The capsule layer ----

// The weights as loops like them.
struct Plain {
  Floats weight;  // (i, j, d, e), of a float projection
  Signs signs;    // (i, j, d, e), of a binarized one
  Floats scale;   // (i, j, e), of a binarized one: mean(abs(weight)) over d, or learned
  bool learned;   // the scale is a parameter and stands for mean(abs(x)) as well
};

inline int64_t at(const Layer& layer, int64_t i, int64_t j, int64_t e) {
  return (i * layer.caps_out + j) * layer.dim_out + e;
}

inline int64_t at(const Layer& layer, int64_t i, int64_t j, int64_t d, int64_t e) {
  return ((i * layer.caps_out + j) * layer.dim_in + d) * layer.dim_out + e;
}

inline int64_t predictions(const Layer& layer) {
  return layer.caps_in * layer.caps_out * layer.dim_out;
}

// From what a forward call gets: laned arrays, see layout.h.
inline Plain plain(const Layer& layer, const Weights& weights) {
  const int64_t outputs = layer.caps_out * layer.dim_out, bytes = bytes_for(layer.dim_in);
  const bool binarized = layer.projection != Binarizer::none;
  Plain result;
  result.learned = weights.learned;
  if (binarized) {
    result.signs.resize(predictions(layer) * layer.dim_in);
    result.scale.resize(predictions(layer));
  } else {
    result.weight.resize(predictions(layer) * layer.dim_in);
  }

  for (int64_t i = 0; i < layer.caps_in; ++i)
    for (int64_t j = 0; j < layer.caps_out; ++j)
      for (int64_t e = 0; e < layer.dim_out; ++e) {
        const int64_t output = j * layer.dim_out + e;
        for (int64_t d = 0; d < layer.dim_in; ++d) {
          if (binarized) {
            const int64_t row = output * bytes + d / 8;
            const uint8_t* byte = weights.bits + laned(row, i, outputs * bytes, layer.caps_in);
            result.signs[at(layer, i, j, d, e)] = unpack(byte, d % 8);
          } else {
            const int64_t row = output * layer.dim_in + d;
            const int64_t where = laned(row, i, outputs * layer.dim_in, layer.caps_in);
            result.weight[at(layer, i, j, d, e)] = weights.floats[where];
          }
        }
        if (binarized) {
          const int64_t where = laned(output, i, outputs, layer.caps_in);
          result.scale[at(layer, i, j, e)] =
              weights.half ? half_to_float(static_cast<const uint16_t*>(weights.scale)[where])
                           : static_cast<const float*>(weights.scale)[where];
        }
      }
  return result;
}

// From what a backward call gets: the layer's own parameters.
inline Plain plain(const Layer& layer, const BackwardCall& call) {
  Plain result;
  result.learned = call.scale != nullptr;
  if (layer.projection == Binarizer::none) {
    result.weight.assign(call.weight, call.weight + predictions(layer) * layer.dim_in);
    return result;
  }
  result.signs.resize(predictions(layer) * layer.dim_in);
  result.scale.resize(predictions(layer));
  for (int64_t i = 0; i < layer.caps_in; ++i)
    for (int64_t j = 0; j < layer.caps_out; ++j)
      for (int64_t e = 0; e < layer.dim_out; ++e) {
        const float* column = call.weight + at(layer, i, j, 0, e);
        const Signs of_column = signs(layer.projection, column, layer.dim_in, layer.dim_out);
        for (int64_t d = 0; d < layer.dim_in; ++d)
          result.signs[at(layer, i, j, d, e)] = of_column[d];
        result.scale[at(layer, i, j, e)] = call.scale
                                               ? call.scale[at(layer, i, j, e)]
                                               : mean_abs(column, layer.dim_in, layer.dim_out);
      }
  return result;
}

// The dot product of the signs of x_i with those of one column of W_ij.
inline int64_t sign_dot(const Layer& layer, const Plain& plain, const Signs& x_signs, int64_t i,
                        int64_t j, int64_t e) {
  int64_t dots = 0;
  for (int64_t d = 0; d < layer.dim_in; ++d)
    dots += x_signs[d] * plain.signs[at(layer, i, j, d, e)];
  return dots;
}

// The predictions u (i, j, e) of one sample x (i, d).
inline Floats project(const Layer& layer, const Plain& plain, const float* x) {
  Floats u(predictions(layer));
  for (int64_t i = 0; i < layer.caps_in; ++i) {
    const float* capsule = x + i * layer.dim_in;
    if (layer.projection == Binarizer::none) {
      for (int64_t j = 0; j < layer.caps_out; ++j)
        for (int64_t e = 0; e < layer.dim_out; ++e) {
          double sum = 0;
          for (int64_t d = 0; d < layer.dim_in; ++d)
            sum += static_cast<double>(capsule[d]) * plain.weight[at(layer, i, j, d, e)];
          u[at(layer, i, j, e)] = static_cast<float>(sum);
        }
    } else {
      const Signs x_signs = signs(layer.projection, capsule, layer.dim_in);
      const float x_scale = mean_abs(capsule, layer.dim_in);
      for (int64_t j = 0; j < layer.caps_out; ++j)
        for (int64_t e = 0; e < layer.dim_out; ++e) {
          const float dots = static_cast<float>(sign_dot(layer, plain, x_signs, i, j, e));
          const float scale = plain.scale[at(layer, i, j, e)];
          u[at(layer, i, j, e)] = plain.learned ? dots * scale : (dots * x_scale) * scale;
        }
    }
  }
  return u;
}

// Rounded before the root, because a square that overflows in float32 gives NaN in the layers.
inline float length(const float* s, int64_t count) {
  double square = 0;
  for (int64_t e = 0; e < count; ++e) square += static_cast<double>(s[e]) * s[e];
  return std::sqrt(static_cast<float>(square));
}

// v = s * norm / (1 + norm^2): a zero vector stays one, without an epsilon.
inline void squash(const float* s, int64_t count, float* v) {
  const float norm = length(s, count);
  for (int64_t e = 0; e < count; ++e) v[e] = s[e] * (norm / (1 + norm * norm));
}

inline void squash_all(const SquashCall& call) {
  for (int64_t k = 0; k < call.count; ++k) {
    squash(call.s + k * call.dim, call.dim, call.v + k * call.dim);
  }
}

inline void primary(const PrimaryCall& call) {
  Floats s(call.caps * call.dim);
  for (int64_t k = 0; k < call.caps * call.dim; ++k) {
    double sum = call.bias == nullptr ? 0 : call.bias[k];
    for (int64_t f = 0; f < call.features; ++f) {
      sum += static_cast<double>(call.weight[k * call.features + f]) * call.x[f];
    }
    s[k] = static_cast<float>(sum);
  }
  squash_all({s.data(), call.caps, call.dim, call.v, 1});
}

// The couplings of one input capsule: softmax over caps_out. Less the highest logit, so that no
// exponential overflows.
inline void softmax(const float* logits, int64_t count, float* coupling) {
  double highest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t j = 0; j < count; ++j)
    if (logits[j] > highest) highest = logits[j];
  for (int64_t j = 0; j < count; ++j) sum += std::exp(logits[j] - highest);
  for (int64_t j = 0; j < count; ++j)
    coupling[j] = static_cast<float>(std::exp(logits[j] - highest) / sum);
}

// How much the prediction u agrees with the output capsule v: what its logit grows by.
inline float agreement(const Layer& layer, const float* u, const float* v, const float* learned) {
  if (layer.agreement == Binarizer::none) {
    double sum = 0;
    for (int64_t e = 0; e < layer.dim_out; ++e) sum += static_cast<double>(u[e]) * v[e];
    return static_cast<float>(sum);
  }
  const Signs u_signs = signs(layer.agreement, u, layer.dim_out);
  const Signs v_signs = signs(layer.agreement, v, layer.dim_out);
  int64_t sum = 0;
  for (int64_t e = 0; e < layer.dim_out; ++e) sum += u_signs[e] * v_signs[e];
  const float dots = static_cast<float>(sum);
  if (learned) return dots * *learned;
  return (dots * mean_abs(u, layer.dim_out)) * mean_abs(v, layer.dim_out);
}

inline void forward(const Layer& layer, const Weights& weights, const ForwardCall& call) {
  const int64_t caps_in = layer.caps_in, caps_out = layer.caps_out, dim_out = layer.dim_out;
  const int64_t outputs = caps_out * dim_out, lanes = padded(caps_in);
  const Plain parameters = plain(layer, weights);

  for (int64_t b = 0; b < call.batch; ++b) {
    const Floats u = project(layer, parameters, call.x + b * caps_in * layer.dim_in);
    Floats logits(caps_in * caps_out, 0.0f);
    float* v = call.v + b * outputs;

    for (int64_t step = 0; step < layer.iterations; ++step) {
      Floats coupling(caps_in * caps_out);
      for (int64_t i = 0; i < caps_in; ++i)
        softmax(&logits[i * caps_out], caps_out, &coupling[i * caps_out]);

      Floats s(outputs);
      for (int64_t j = 0; j < caps_out; ++j)
        for (int64_t e = 0; e < dim_out; ++e) {
          double sum = weights.bias ? weights.bias[j * dim_out + e] : 0;
          for (int64_t i = 0; i < caps_in; ++i)
            sum += static_cast<double>(coupling[i * caps_out + j]) * u[at(layer, i, j, e)];
          s[j * dim_out + e] = static_cast<float>(sum);
        }
      for (int64_t j = 0; j < caps_out; ++j) squash(&s[j * dim_out], dim_out, v + j * dim_out);

      if (call.sums)
        for (int64_t k = 0; k < outputs; ++k)
          call.sums[(b * layer.iterations + step) * outputs + k] = s[k];
      if (call.couplings && step > 0)
        for (int64_t j = 0; j < caps_out; ++j)
          for (int64_t i = 0; i < lanes; ++i) {
            const int64_t row = (b * (layer.iterations - 1) + step - 1) * caps_out + j;
            call.couplings[row * lanes + i] = i < caps_in ? coupling[i * caps_out + j] : 0.0f;
          }

      // After the last iteration nothing would read the logits.
      if (step + 1 < layer.iterations)
        for (int64_t i = 0; i < caps_in; ++i)
          for (int64_t j = 0; j < caps_out; ++j)
            logits[i * caps_out + j] +=
                agreement(layer, &u[at(layer, i, j, 0)], v + j * dim_out,
                          weights.agreement_scale ? weights.agreement_scale + j : nullptr);
    }
  }
}

// ---- Its gradients: forward, line by line in reverse. grad_y is the gradient of
// sum(v * call.grad_v) with respect to y; functions add to what they are given. ----

// Through v = squash(s): with f(n) = n / (1 + n^2) it is f g + (s . g) f'(n) / n s; 0 at s = 0.
inline void squash_backward(const float* s, int64_t count, const double* grad_v, double* grad_s) {
  const double norm = length(s, count), square = norm * norm;
  if (norm == 0) return;
  double along = 0;
  for (int64_t e = 0; e < count; ++e) along += s[e] * grad_v[e];
  const double slope = (1 - square) / ((1 + square) * (1 + square));
  for (int64_t e = 0; e < count; ++e)
    grad_s[e] += norm / (1 + square) * grad_v[e] + along * slope / norm * s[e];
}

// Through the agreement of u with v. `grad_u` is null where the predictions are constants.
inline void agreement_backward(const Layer& layer, const float* u, const float* v,
                               const float* learned, double grad, double* grad_u, double* grad_v,
                               double* grad_learned) {
  const int64_t count = layer.dim_out;
  if (layer.agreement == Binarizer::none) {
    for (int64_t e = 0; e < count; ++e) {
      grad_v[e] += grad * u[e];
      if (grad_u) grad_u[e] += grad * v[e];
    }
    return;
  }
  const Signs u_signs = signs(layer.agreement, u, count);
  const Signs v_signs = signs(layer.agreement, v, count);
  const double u_scale = mean_abs(u, count), v_scale = mean_abs(v, count);
  double dots = 0;
  for (int64_t e = 0; e < count; ++e) dots += u_signs[e] * v_signs[e];

  if (learned) *grad_learned += grad * dots;
  const double grad_dots = grad * (learned ? *learned : u_scale * v_scale);
  for (int64_t e = 0; e < count; ++e) {
    grad_v[e] += through_sign(layer.agreement, v[e], grad_dots * u_signs[e]);
    if (grad_u) grad_u[e] += through_sign(layer.agreement, u[e], grad_dots * v_signs[e]);
  }
  if (learned || layer.detach_scale) return;
  for (int64_t e = 0; e < count; ++e) {
    grad_v[e] += grad * dots * u_scale * slope_of_abs(v[e]) / count;
    if (grad_u) grad_u[e] += grad * dots * v_scale * slope_of_abs(u[e]) / count;
  }
}

// The gradients of all parameters, summed over the batch.
struct Gradients {
  Doubles weight;           // (i, j, d, e)
  Doubles scale;            // (i, j, e)
  Doubles bias;             // (j, e)
  Doubles agreement_scale;  // (j)
};

// Through the routing of one sample: grad_v (j, e) -> grad_u (i, j, e), which is returned.
inline Doubles routing_backward(const Layer& layer, const Weights& weights, const Floats& u,
                                const float* sums, const float* couplings, const float* grad_v,
                                const float* grad_couplings, Gradients& grads) {
  const int64_t caps_in = layer.caps_in, caps_out = layer.caps_out, dim_out = layer.dim_out;
  const int64_t outputs = caps_out * dim_out, lanes = padded(caps_in);
  Doubles grad_u(u.size(), 0.0);
  Doubles grad_logits(caps_in * caps_out, 0.0);

  for (int64_t step = layer.iterations - 1; step >= 0; --step) {
    const bool last = step == layer.iterations - 1;
    const bool constant = layer.detach_routing && !last;  // the predictions, in this iteration
    const float* s = sums + step * outputs;
    const auto coupling = [&](int64_t i, int64_t j) {
      return step == 0 ? 1.0f / caps_out : couplings[((step - 1) * caps_out + j) * lanes + i];
    };

    // logits += agreement(u, v); grad_logits is that of the sum, thus of both its terms.
    Doubles grad_step(outputs, 0.0);
    if (last) {
      grad_step.assign(grad_v, grad_v + outputs);
    } else {
      Floats v(outputs);
      for (int64_t j = 0; j < caps_out; ++j) squash(s + j * dim_out, dim_out, &v[j * dim_out]);
      for (int64_t i = 0; i < caps_in; ++i)
        for (int64_t j = 0; j < caps_out; ++j)
          agreement_backward(layer, &u[at(layer, i, j, 0)], &v[j * dim_out],
                             weights.agreement_scale ? weights.agreement_scale + j : nullptr,
                             grad_logits[i * caps_out + j],
                             constant ? nullptr : &grad_u[at(layer, i, j, 0)],
                             &grad_step[j * dim_out], &grads.agreement_scale[j]);
    }

    // v = squash(s)
    Doubles grad_s(outputs, 0.0);
    for (int64_t j = 0; j < caps_out; ++j)
      squash_backward(s + j * dim_out, dim_out, &grad_step[j * dim_out], &grad_s[j * dim_out]);

    // s = sum of coupling * u, + bias
    for (int64_t k = 0; k < outputs; ++k) grads.bias[k] += grad_s[k];
    Doubles grad_coupling(caps_in * caps_out, 0.0);
    for (int64_t i = 0; i < caps_in; ++i)
      for (int64_t j = 0; j < caps_out; ++j)
        for (int64_t e = 0; e < dim_out; ++e) {
          const int64_t k = at(layer, i, j, e);
          if (!constant) grad_u[k] += coupling(i, j) * grad_s[j * dim_out + e];
          grad_coupling[i * caps_out + j] += grad_s[j * dim_out + e] * u[k];
        }

    // coupling = softmax(logits); in the first iteration of logits that are 0 whatever happens.
    if (step == 0) continue;
    for (int64_t i = 0; grad_couplings && i < caps_in; ++i)
      for (int64_t j = 0; j < caps_out; ++j)
        grad_coupling[i * caps_out + j] +=
            grad_couplings[((step - 1) * caps_out + j) * lanes + i];
    for (int64_t i = 0; i < caps_in; ++i) {
      double mean = 0;
      for (int64_t j = 0; j < caps_out; ++j)
        mean += coupling(i, j) * grad_coupling[i * caps_out + j];
      for (int64_t j = 0; j < caps_out; ++j)
        grad_logits[i * caps_out + j] +=
            coupling(i, j) * (grad_coupling[i * caps_out + j] - mean);
    }
  }
  return grad_u;
}

// Through the projection of one sample: grad_u (i, j, e) -> grad_x (i, d), which is returned.
inline Doubles project_backward(const Layer& layer, const Plain& plain, const float* weight,
                                const float* x, const Doubles& grad_u, Gradients& grads) {
  const int64_t dim_in = layer.dim_in;
  Doubles grad_x(layer.caps_in * dim_in, 0.0);
  for (int64_t i = 0; i < layer.caps_in; ++i) {
    const float* capsule = x + i * dim_in;
    double* grad_capsule = &grad_x[i * dim_in];
    const Signs x_signs = signs(layer.projection, capsule, dim_in);
    const double x_scale = mean_abs(capsule, dim_in);

    for (int64_t j = 0; j < layer.caps_out; ++j)
      for (int64_t e = 0; e < layer.dim_out; ++e) {
        const double grad = grad_u[at(layer, i, j, e)];
        if (layer.projection == Binarizer::none) {
          for (int64_t d = 0; d < dim_in; ++d) {
            const int64_t k = at(layer, i, j, d, e);
            grad_capsule[d] += grad * plain.weight[k];
            grads.weight[k] += grad * capsule[d];
          }
          continue;
        }
        const double dots = static_cast<double>(sign_dot(layer, plain, x_signs, i, j, e));
        const double scale = plain.scale[at(layer, i, j, e)];
        if (plain.learned) grads.scale[at(layer, i, j, e)] += grad * dots;
        const double grad_dots = grad * (plain.learned ? scale : x_scale * scale);
        const bool through_means = !plain.learned && !layer.detach_scale;
        for (int64_t d = 0; d < dim_in; ++d) {
          const int64_t k = at(layer, i, j, d, e);
          grad_capsule[d] += through_sign(layer.projection, capsule[d], grad_dots * plain.signs[k]);
          grads.weight[k] += through_sign(layer.projection, weight[k], grad_dots * x_signs[d]);
          if (through_means) {
            grad_capsule[d] += grad * dots * scale * slope_of_abs(capsule[d]) / dim_in;
            grads.weight[k] += grad * dots * x_scale * slope_of_abs(weight[k]) / dim_in;
          }
        }
      }
  }
  return grad_x;
}

inline void write(const Doubles& values, float* to) {
  if (!to) return;
  for (std::size_t k = 0; k < values.size(); ++k) to[k] = static_cast<float>(values[k]);
}

// Of the weights only the learned scale of the agreement is read: all else is in the call.
inline void backward(const Layer& layer, const Weights& weights, const BackwardCall& call) {
  const int64_t inputs = layer.caps_in * layer.dim_in, outputs = layer.caps_out * layer.dim_out;
  const int64_t coupled = (layer.iterations - 1) * layer.caps_out * padded(layer.caps_in);
  const Plain parameters = plain(layer, call);
  Gradients grads{Doubles(predictions(layer) * layer.dim_in), Doubles(predictions(layer)),
                  Doubles(outputs), Doubles(layer.caps_out)};

  for (int64_t b = 0; b < call.batch; ++b) {
    const float* x = call.x + b * inputs;
    const Floats u = project(layer, parameters, x);
    const Doubles grad_u = routing_backward(
        layer, weights, u, call.sums + b * layer.iterations * outputs,
        call.couplings + b * coupled, call.grad_v + b * outputs,
        call.grad_couplings ? call.grad_couplings + b * coupled : nullptr, grads);
    const Doubles grad_x = project_backward(layer, parameters, call.weight, x, grad_u, grads);
    write(grad_x, call.grad_x ? call.grad_x + b * inputs : nullptr);
  }
  write(grads.weight, call.grad_weight);
  write(grads.scale, call.grad_scale);
  write(grads.bias, call.grad_bias);
  write(grads.agreement_scale, call.grad_agreement_scale);
}

// ---- The layers of XNOR-Net ----

inline void linear(const LinearCall& call) {
  const int64_t bytes = bytes_for(call.in_features);
  for (int64_t row = 0; row < call.rows; ++row) {
    const float* x = call.x + row * call.in_features;
    const Signs x_signs = signs(call.binarizer, x, call.in_features);
    const float x_scale = mean_abs(x, call.in_features);
    for (int64_t o = 0; o < call.out_features; ++o) {
      int64_t sum = 0;
      for (int64_t k = 0; k < call.in_features; ++k)
        sum += x_signs[k] * unpack(call.bits + laned(k / 8, o, bytes, call.out_features), k % 8);
      const float dots = static_cast<float>(sum), scale = call.scale[o];
      const float y = call.learned ? dots * scale : (dots * x_scale) * scale;
      call.y[row * call.out_features + o] = call.bias ? y + call.bias[o] : y;
    }
  }
}

inline void conv(const ConvCall& call) {
  const int64_t channels = call.channels, bytes = bytes_for(channels);
  const int64_t plane = call.height * call.width;
  const int64_t area = call.kernel[0] * call.kernel[1];
  const Signs outside(channels, -1);

  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t p = 0; p < call.out_height; ++p)
      for (int64_t q = 0; q < call.out_width; ++q) {
        std::vector<int64_t> sums(call.out_channels, 0);
        double means = 0;  // outside the image they are 0
        for (int64_t r = 0; r < call.kernel[0]; ++r)
          for (int64_t c = 0; c < call.kernel[1]; ++c) {
            const int64_t h = p * call.stride[0] - call.padding[0] + r * call.dilation[0];
            const int64_t w = q * call.stride[1] - call.padding[1] + c * call.dilation[1];
            Signs pixel_signs = outside;
            if (h >= 0 && h < call.height && w >= 0 && w < call.width) {
              const float* pixel = call.x + b * channels * plane + h * call.width + w;
              pixel_signs = signs(call.binarizer, pixel, channels, plane);
              means += mean_abs(pixel, channels, plane);
            }
            for (int64_t o = 0; o < call.out_channels; ++o) {
              const uint8_t* tap = call.bits + (o * area + r * call.kernel[1] + c) * bytes;
              for (int64_t k = 0; k < channels; ++k) sums[o] += pixel_signs[k] * unpack(tap, k);
            }
          }
        const float x_scale = static_cast<float>(means / area);
        for (int64_t o = 0; o < call.out_channels; ++o) {
          const float dots = static_cast<float>(sums[o]);
          const float y = dots * (call.learned ? call.scale[o] : x_scale * call.scale[o]);
          const int64_t row = (b * call.out_channels + o) * call.out_height + p;
          call.y[row * call.out_width + q] = call.bias ? y + call.bias[o] : y;
        }
      }
}

}  // namespace xncaps::reference
