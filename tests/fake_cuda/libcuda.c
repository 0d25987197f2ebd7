// A CUDA driver that writes down what it is asked: a "kernel's code" is the signature of its
// arguments, as Kernel.prepare has it. One line a launch; fake_log takes them.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Word;
struct Kernel { char signature[200], entry[100]; };
struct Attribute { int what, padding; unsigned value[16]; };
struct Config { unsigned grid[3], block[3], shared; void* stream; struct Attribute* attributes; unsigned count; };

static char written[1 << 20];
static size_t length;

static void say(const char* format, ...) {
  va_list values;
  va_start(values, format);
  length += (size_t)vsnprintf(written + length, sizeof written - length, format, values);
  va_end(values);
}

const char* fake_log(void) { length = 0; return written; }

int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d,
                      void* e, unsigned f) {
  struct Kernel* kernel = calloc(1, sizeof *kernel);
  strncpy(kernel->signature, code, sizeof kernel->signature - 1);
  *library = kernel;
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* entry) {
  strncpy(((struct Kernel*)library)->entry, entry, 99);
  *kernel = library;
  return 0;
}

int cuDeviceGet(int* device, int number) { *device = number; return 0; }

int cuDevicePrimaryCtxRetain(void** context, int device) { *context = written; return device; }

int cuCtxSetCurrent(void* context) { return context != written; }

int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  say("allow %s %d %d\n", ((struct Kernel*)kernel)->entry, attribute, value);
  return 0;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const Word* sizes,
                           const Word* strides, const unsigned* box, const unsigned* ones,
                           int interleave, int swizzle, int l2, int fill) {
  snprintf(map, 128, "%llu:%d:%llu:%llu:%llu:%u:%u:%d:%d", (Word)address, type, sizes[1], sizes[0],
           strides[0], box[1], box[0], swizzle, l2);
  return rank != 2 || ones[0] != 1 || ones[1] != 1 || interleave || fill || (Word)map % 64;
}

int cuLaunchKernelEx(const struct Config* config, void* handle, void** given, void** extra) {
  struct Kernel* kernel = handle;
  unsigned cluster[3] = {1, 1, 1}, dependent = 0;
  for (unsigned i = 0; i < config->count; ++i) {
    const struct Attribute* attribute = &config->attributes[i];
    if (attribute->what == 4) memcpy(cluster, attribute->value, sizeof cluster);
    if (attribute->what == 6) dependent = attribute->value[0];
  }
  say("run %s %u %u %u %u %u %u %u %u %u %u %u", kernel->entry, config->grid[0], config->grid[1],
      config->grid[2], config->block[0], config->block[1], config->block[2], config->shared,
      cluster[0], cluster[1], cluster[2], dependent);
  for (int i = 0; kernel->signature[i]; ++i) {
    const void* at = given[i];
    switch (kernel->signature[i]) {
      case 'i': say(" i%d", *(const int*)at); break;
      case 'u': say(" u%u", *(const unsigned*)at); break;
      case 'l': say(" l%lld", *(const long long*)at); break;
      case 'f': say(" f%a", *(const float*)at); break;
      case 'd': say(" d%a", *(const double*)at); break;
      case 'm': say(" m%s", (const char*)at); break;
      default: say(" %c%llu", kernel->signature[i], *(const Word*)at);
    }
  }
  say(" stream %llu\n", (Word)config->stream);
  return 0;
}
