// A device of PyTorch for tests, on the CPU with memory of its own; see devices.py.
//
// Operators run in the kernels of the CPU, on copies. An operator whose tensors are partly on the CPU is an error, with
// the exceptions of a GPU: copies, CPU tensors without dimensions, and CPU indices. So are random numbers drawn into a
// tensor of this device with a generator of the CPU. float64 can be switched off, with the error that MPS raises.
#include <torch/extension.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr auto kStandIn = c10::DeviceType::PrivateUse1;
bool has_float64 = true;

c10::ScalarType supported(std::optional<c10::ScalarType> dtype) {
  auto type = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(has_float64 || (type != c10::kDouble && type != c10::kComplexDouble),
                   "Cannot convert a standin Tensor to float64 dtype as the device doesn't support float64");
  return type;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? malloc(bytes) : nullptr;
    return {data, data, &free, c10::Device(kStandIn, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kStandIn, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStandIn; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kStandIn, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           supported(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   supported(dtype), format);
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  if (!self.is_cpu() && self.scalar_type() != dst.scalar_type()) supported(dst.scalar_type());  // converted first
  auto source = self.is_cpu() ? self : on_cpu(self);
  (dst.is_cpu() ? dst : on_cpu(dst)).copy_(source);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    auto fresh = memory.allocate(bytes);
    if (self.storage().nbytes()) memcpy(fresh.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(fresh));
    self.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return on_cpu(self).item(); }

void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& name = op.schema().name();
  const bool takes_cpu_indices = name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_";
  bool has_cpu = false, has_standin = false, has_cpu_generator = false;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    has_cpu |= tensor.is_cpu() && tensor.dim() > 0;
    has_standin |= !tensor.is_cpu();
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorVector()) look(one);
    } else if (value.isOptionalTensorList() && !takes_cpu_indices) {
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
        if (one) look(*one);
      }
    } else if (value.isGenerator()) {
      has_cpu_generator |= value.toGenerator().defined();
    }
  }
  TORCH_CHECK(!(has_cpu && has_standin), "Expected all tensors to be on the same device, but ", name,
              " received tensors on standin:0 and on cpu");
  TORCH_CHECK(!(has_cpu_generator && has_standin), "Expected a 'standin' device type for generator but found 'cpu'");
  at::native::cpu_fallback(op, stack);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register", [](bool with_float64) {
    has_float64 = with_float64;
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
}
