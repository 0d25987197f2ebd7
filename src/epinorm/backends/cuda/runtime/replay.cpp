// Launches what was recorded once, with other addresses: replay.py says what and why.
#include <cstdint>
#include <cstring>

namespace {

// As cuda.h has had them since CUDA 12.0.
using LaunchKernelEx = int (*)(const void* config, void* kernel, void** arguments, void** extra);
using EncodeTiled = int (*)(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                            int interleave, int swizzle, int promotion, int fill);

constexpr int kStreamInConfig = 32;  // bytes
constexpr int kMapBytes = 128;
constexpr int kMostBytes = 16384, kMostArguments = 128;
constexpr int kMapsKept = 512;

struct Map {
  uint64_t id, sizes[2], stride;
  uint32_t box[2];
  int32_t type, swizzle, promotion, padding;
};

// What a call decides: an address, or a map of a matrix there (map: -1 for none).
struct Place {
  uint32_t at;
  int32_t buffer, map, padding;
  int64_t offset;
};

struct Launch {
  uint64_t kernel;
  uint32_t frame, first, count, padding;  // a CUlaunchConfig and arguments; their offsets
};

struct Program {
  LaunchKernelEx launch;
  EncodeTiled encode;
  const char* frames;
  const Launch* launches;
  const uint32_t* offsets;
  const Place* places;
  const Map* maps;
  uint32_t bytes, launch_count, place_count, padding;
};

struct KeptMap {
  uint64_t id, address;
  alignas(64) char data[kMapBytes];
};

// Of this thread; ids begin with 1.
thread_local KeptMap kept[kMapsKept];

int write_map(const Program& program, const Map& map, uint64_t address, char* at) {
  KeptMap& found = kept[((address >> 8) * 31 + map.id) % kMapsKept];
  if (found.id != map.id || found.address != address) {
    const uint32_t ones[2] = {1, 1};
    found.id = 0;
    const int status =
        program.encode(found.data, map.type, 2, reinterpret_cast<void*>(address), map.sizes,
                       &map.stride, map.box, ones, 0, map.swizzle, map.promotion, 0);
    if (status) return status;
    found.id = map.id;
    found.address = address;
  }
  std::memcpy(at, found.data, kMapBytes);
  return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int epinorm_replay_limits(int* arguments) {
  *arguments = kMostArguments;
  return kMostBytes;
}

// Returns a CUresult; where it is none, *done launches went well.
int epinorm_replay(const Program* program, const uint64_t* buffers, void* stream, int* done) {
  alignas(64) char frames[kMostBytes];
  std::memcpy(frames, program->frames, program->bytes);
  *done = 0;
  for (uint32_t i = 0; i < program->place_count; ++i) {
    const Place& place = program->places[i];
    const uint64_t address = buffers[place.buffer] + place.offset;
    if (place.map < 0) {
      std::memcpy(frames + place.at, &address, sizeof address);
    } else if (int status = write_map(*program, program->maps[place.map], address,
                                      frames + place.at)) {
      return status;
    }
  }
  for (; *done < static_cast<int>(program->launch_count); ++*done) {
    const Launch& launch = program->launches[*done];
    char* const frame = frames + launch.frame;
    std::memcpy(frame + kStreamInConfig, &stream, sizeof stream);
    void* arguments[kMostArguments];
    for (uint32_t i = 0; i < launch.count; ++i)
      arguments[i] = frame + program->offsets[launch.first + i];
    if (int status = program->launch(frame, reinterpret_cast<void*>(launch.kernel), arguments,
                                     nullptr))
      return status;
  }
  return 0;
}
}
#pragma GCC visibility pop
