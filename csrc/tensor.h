// Tensors of torch, seen through the attributes they have in Python: the build knows nothing of torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>

namespace xncaps {

namespace nb = nanobind;

// Where torch keeps what is asked here. Python tells it once, before anything else is called.
struct Torch {
  nb::tuple types;            // of tensors that do nothing of their own
  nb::object float32, strided;
  nb::object is_grad_enabled, num_threads;
  nb::tuple modes;            // functions; one that returns a true value wants to see every operation
  nb::dict forward_ad;        // variables of torch.autograd.forward_ad
};
void set_torch(Torch torch);

// Whether no function transform, tracer or dispatch mode wants to see every operation.
bool is_plain_call();

// Whether an object is a tensor of float32 numbers that lie in the memory of this machine.
bool is_plain_tensor(nb::handle object);

// Whether the result must be able to give this tensor a gradient.
bool needs_gradient(nb::handle tensor);

// Its sizes, if there are so many; else false.
bool read_shape(nb::handle tensor, int64_t* sizes, int count);

nb::object contiguous(nb::handle tensor);
nb::object new_empty(nb::handle like, std::initializer_list<int64_t> sizes);
uintptr_t address_of(nb::handle tensor);
int num_threads();

// Places of dictionaries: whether they still hold what they held, tensors at the same address.
class Watched {
 public:
  // Each is (dictionary, key, value, address of its data or 0).
  explicit Watched(nb::list places) : places_(std::move(places)) {}
  bool is_unchanged() const;

 private:
  nb::list places_;
};

}  // namespace xncaps
