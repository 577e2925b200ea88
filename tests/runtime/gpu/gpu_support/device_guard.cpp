// Lets PyTorch's CPU build treat tensors of a subclass as lying on a device of the type CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct PretendedGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new PretendedGuard);

}  // namespace
