// Tensors of torch, seen as Python sees them or through torch's DLPack table: the build knows nothing of
// torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace xncaps {

namespace nb = nanobind;

// Where torch keeps what is asked here. Python tells it once, before anything else is called.
struct Torch {
  nb::tuple types;            // of tensors that do nothing of their own
  nb::object float32, strided;
  nb::object is_grad_enabled, num_threads;
  nb::tuple modes;            // functions; one that returns a true value wants to see every operation
  nb::dict forward_ad;        // variables of torch.autograd.forward_ad
  nb::object exchange;        // the capsule of DLPack functions, or None where torch has none yet
  nb::object empty_strided;   // makes a tensor in the memory of this machine without the dispatcher, or None
};
void set_torch(Torch torch);

// A name of an attribute, made once; an attribute, invalid where there is an error; an object, or the error thrown.
nb::handle name(const char* text);
nb::object attribute(nb::handle object, nb::handle name);
nb::object checked(nb::object object);

// Whether no function transform, tracer or dispatch mode wants to see every operation.
bool is_plain_call();

// The numbers of a tensor and where they lie.
struct View {
  static constexpr int kMost = 4;
  uintptr_t data;
  int64_t sizes[kMost];
  int dims;  // of more than kMost, the first sizes only
  bool is_contiguous;
};

// Whether an object is a tensor of float32 numbers that lie in the memory of this machine; a view of
// it, then.
bool view_tensor(nb::handle object, View& view);

// Whether the result must be able to give this tensor a gradient.
bool needs_gradient(nb::handle tensor);

nb::object contiguous(nb::handle tensor);
// The sizes and strides of a contiguous tensor as Python has them.
struct Shape {
  nb::object sizes, strides;
};
Shape shape_of(std::initializer_list<int64_t> sizes);
// A new tensor beside one that can be viewed, its numbers not set.
nb::object new_empty(nb::handle like, const Shape& shape);
uintptr_t address_of(nb::handle tensor);
// How often torch has written to a tensor; -1 where torch does not count.
int64_t writes_to(nb::handle tensor);
int num_threads();

// Places of dictionaries: whether they still hold what they held, tensors at the same address.
class Watched {
 public:
  // Each is (dictionary, key, value, address of its data or 0).
  explicit Watched(nb::list places);
  bool is_unchanged() const;
  nb::handle tensor_at(uintptr_t address) const;  // the one with its numbers there, or none

  // For the collector of garbage.
  int traverse(visitproc visit, void* arg) const;
  void clear() { places_.clear(); }

 private:
  struct Place {
    nb::dict dictionary;
    nb::object key, value;
    uintptr_t address;
  };
  std::vector<Place> places_;
};

}  // namespace xncaps
