"""The mathematics of the library once more, in loops over Python floats: slow, short and obvious.

Every function takes nested lists. Letters: i caps_in, j caps_out, d dim_in, e dim_out.
"""

import math


def signs(values, how="sign"):
    threshold = (max(values) + min(values)) / 2 if how == "midrange" else 0.0
    return [1.0 if value > threshold else -1.0 for value in values]


def slope(value, how="sign"):
    """What stands in for the derivative of a sign."""
    if how == "approxsign":
        return max(0.0, 2 - 2 * abs(value))
    return 1.0 if abs(value) <= 1 else 0.0


def scale(values):
    return sum(abs(value) for value in values) / len(values)


def dot(a, b):
    return sum(p * q for p, q in zip(a, b, strict=True))


def xnor_dot(a, b, how="sign", learned=None):
    factor = scale(a) * scale(b) if learned is None else learned
    return dot(signs(a, how), signs(b, how)) * factor


def length(vector):
    return math.sqrt(sum(value * value for value in vector))


def squash(s):
    norm = length(s)
    if norm == 0:
        return [0.0 for _ in s]
    return [norm**2 / (1 + norm**2) * value / norm for value in s]


def softmax(logits):
    exponentials = [math.exp(value - max(logits)) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def route(u, iterations, how=None, scales=None, bias=None):
    """One sample u[i][j] -> v[j] and coupling[i][j]; ``how`` xnorizes the agreement."""
    caps_in, caps_out, dim_out = len(u), len(u[0]), len(u[0][0])
    logits = [[0.0] * caps_out for _ in range(caps_in)]
    for _ in range(iterations):
        coupling = [softmax(row) for row in logits]
        v = []
        for j in range(caps_out):
            s = [0.0 if bias is None else bias[j][e] for e in range(dim_out)]
            for i in range(caps_in):
                for e in range(dim_out):
                    s[e] += coupling[i][j] * u[i][j][e]
            v.append(squash(s))
        for i in range(caps_in):
            for j in range(caps_out):
                if how is None:
                    logits[i][j] += dot(u[i][j], v[j])
                else:
                    learned = None if scales is None else scales[j]
                    logits[i][j] += xnor_dot(u[i][j], v[j], how, learned)
    return v, coupling


def project(x, weight, how=None, scales=None):
    """One sample x[i][d], weight[i][j][d][e] -> u[i][j][e]; ``how`` xnorizes the projection."""
    u = []
    for i, capsule in enumerate(x):
        u.append([])
        for j, matrix in enumerate(weight[i]):
            u[i].append([])
            for e in range(len(matrix[0])):
                column = [matrix[d][e] for d in range(len(capsule))]
                if how is None:
                    u[i][j].append(dot(capsule, column))
                else:
                    learned = None if scales is None else scales[i][j][0][e]
                    u[i][j].append(xnor_dot(capsule, column, how, learned))
    return u


def capsule_layer(
    x,
    weight,
    iterations,
    projection=None,
    agreement=None,
    scales=None,
    agreement_scales=None,
    bias=None,
):
    """A batch x[b][i][d] -> v[b][j][e] and coupling[b][i][j]."""
    routed = [
        route(
            project(sample, weight, projection, scales),
            iterations,
            agreement,
            agreement_scales,
            bias,
        )
        for sample in x
    ]
    return [v for v, _ in routed], [coupling for _, coupling in routed]


def xnor_linear(x, weight, how="sign", scales=None, bias=None):
    """Rows x[b][f], weight[o][f] -> y[b][o]."""
    return [
        [
            xnor_dot(row, filter_, how, None if scales is None else scales[o])
            + (0.0 if bias is None else bias[o])
            for o, filter_ in enumerate(weight)
        ]
        for row in x
    ]


def xnor_conv2d(x, weight, stride, padding, dilation, how="sign", scales=None, bias=None):
    """A batch x[b][c][h][w], weight[o][c][r][s] -> y[b][o][h'][w']."""
    return [
        [
            _xnor_conv(
                image,
                filter_,
                (stride, padding, dilation),
                how,
                None if scales is None else scales[o],
                0.0 if bias is None else bias[o],
            )
            for o, filter_ in enumerate(weight)
        ]
        for image in x
    ]


def _xnor_conv(image, filter_, geometry, how, learned, bias):
    (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w) = geometry
    channels, height, width = len(image), len(image[0]), len(image[0][0])
    rows, columns = len(filter_[0]), len(filter_[0][0])
    flat = [value for plane in filter_ for row in plane for value in row]
    flat_signs = signs(flat, how)
    out_h = (height + 2 * pad_h - dilation_h * (rows - 1) - 1) // stride_h + 1
    out_w = (width + 2 * pad_w - dilation_w * (columns - 1) - 1) // stride_w + 1
    y = [[0.0] * out_w for _ in range(out_h)]
    for p in range(out_h):
        for q in range(out_w):
            count, window_scale = 0.0, 0.0
            for r in range(rows):
                for s in range(columns):
                    h = p * stride_h - pad_h + r * dilation_h
                    w = q * stride_w - pad_w + s * dilation_w
                    pixel_signs = [-1.0] * channels
                    if 0 <= h < height and 0 <= w < width:
                        pixel = [image[c][h][w] for c in range(channels)]
                        pixel_signs = signs(pixel, how)
                        window_scale += scale(pixel) / (rows * columns)
                    for c in range(channels):
                        count += pixel_signs[c] * flat_signs[(c * rows + r) * columns + s]
            factor = window_scale * scale(flat) if learned is None else learned
            y[p][q] = count * factor + bias
    return y


def margin_loss(lengths, present, m_plus=0.9, m_minus=0.1, down_weight=0.5):
    """lengths[b][k] and present[b][k] of 0 and 1."""
    total = 0.0
    for length_row, present_row in zip(lengths, present, strict=True):
        for value, there in zip(length_row, present_row, strict=True):
            if there:
                total += max(0.0, m_plus - value) ** 2
            else:
                total += down_weight * max(0.0, value - m_minus) ** 2
    return total / len(lengths)


def best(scores, count):
    """The classes of the highest scores of one sample."""
    return sorted(range(len(scores)), key=lambda k: scores[k], reverse=True)[:count]


def top1(scores, classes):
    return 1.0 if best(scores, 1)[0] in classes else 0.0


def exact_pair(scores, classes):
    return 1.0 if set(best(scores, 2)) == set(classes) else 0.0


def per_digit(scores, classes):
    return len(set(best(scores, 2)) & set(classes)) / 2


def paper_top2(scores, classes):
    return 1.0 if min(classes) in best(scores, 2) else 0.0
