// Stands for NVIDIA's libcuda.so.1, to see what cuda-bindings passes on: prints each call, and has memory for two pieces.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>

namespace {

struct Location {
  int type;
  int id;
};

struct AllocationProperties {
  int type;
  int handle_types;
  Location location;
  void* metadata;
  unsigned char flags[8];
};

struct Access {
  Location location;
  int flags;
};

constexpr int kOutOfMemory = 2;
constexpr unsigned long long kAddress = 0x7f0000000000;
unsigned long long handles = 0;
const int unbuffered = std::setvbuf(stdout, nullptr, _IONBF, 0);  // in order with what Python prints

}  // namespace

extern "C" {

int cuInit(unsigned int) { return 0; }

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  std::printf("attribute %d of %d\n", attribute, device);
  *value = 1;
  return 0;
}

int cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties* given, int option) {
  std::printf("granularity %d of %d %d/%d\n", option, given->type, given->location.type, given->location.id);
  *granularity = 2 << 20;
  return 0;
}

int cuMemAddressReserve(unsigned long long* address, size_t size, size_t alignment, unsigned long long at,
                        unsigned long long flags) {
  std::printf("reserve %zu %zu %llu %llu\n", size, alignment, at, flags);
  *address = kAddress;
  return 0;
}

int cuMemAddressFree(unsigned long long address, size_t size) {
  std::printf("free %llx %zu\n", address, size);
  return 0;
}

int cuMemCreate(unsigned long long* handle, size_t size, const AllocationProperties* given, unsigned long long flags) {
  std::printf("create %zu of %d %d/%d, %llu\n", size, given->type, given->location.type, given->location.id, flags);
  *handle = 0xabc0 + ++handles;
  return handles > 2 ? kOutOfMemory : 0;
}

int cuMemRelease(unsigned long long handle) {
  std::printf("release %llx\n", handle);
  return 0;
}

int cuMemMap(unsigned long long address, size_t size, size_t offset, unsigned long long handle,
             unsigned long long flags) {
  std::printf("map %llx %zu %zu %llx %llu\n", address, size, offset, handle, flags);
  return 0;
}

int cuMemSetAccess(unsigned long long address, size_t size, const Access* given, size_t count) {
  std::printf("access %llx %zu %zu of %d/%d, %d\n", address, size, count, given->location.type, given->location.id,
              given->flags);
  return 0;
}

int cuMemUnmap(unsigned long long address, size_t size) {
  std::printf("unmap %llx %zu\n", address, size);
  return 0;
}

int cuGetErrorName(int result, const char** name) {
  *name = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "another error";
  return 0;
}

int cuGetErrorString(int, const char** text) {
  *text = "out of memory";
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  if (status != nullptr) {
    *status = *function == nullptr;
  }
  return 0;
}

int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
