// The launches of a recorded pass as CUDA graphs: one for each set of addresses that comes back.
#pragma once

#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace epinorm {

using Addresses = std::vector<uint64_t>;

// As cuda.h has had them since CUDA 12.0, in the order of replay.py.
struct GraphFunctions {
  int (*create_stream)(void** stream, unsigned flags);
  int (*destroy_stream)(void* stream);
  int (*exchange_capture_mode)(int* mode);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*is_capturing)(void* stream, int* status);
  int (*instantiate)(void** exec, void* graph, unsigned long long flags);
  int (*launch)(void* exec, void* stream);
  int (*destroy)(void* graph);
  int (*destroy_exec)(void* exec);
};

// Of one program. What is launched is the same whether or not a graph does it, as a launch's
// arguments follow from the addresses.
class Graphs {
 public:
  using Launches = std::function<int(void* stream)>;  // to a CUresult

  explicit Graphs(const GraphFunctions& functions) : cuda_(functions) {}
  Graphs(const Graphs&) = delete;
  ~Graphs() {  // one that runs is freed behind its end
    for (const Made& each : made_) cuda_.destroy_exec(each.exec);
  }

  // Whether a graph was launched. One is made where the addresses are seen for the second time.
  bool launch(const Addresses& addresses, void* stream, const Launches& launches) {
    const uint64_t hash = hash_of(addresses);
    // A graph is one thread's at a time; a call meanwhile, or in the middle of this one, needs none.
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    const Release release{busy_};
    return launch_alone(hash, addresses, stream, launches);
  }

 private:
  struct Release {
    std::atomic_flag& flag;
    ~Release() { flag.clear(std::memory_order_release); }
  };

  bool launch_alone(uint64_t hash, const Addresses& addresses, void* stream,
                    const Launches& launches) {
    ++calls_;
    Made* found = find(hash, addresses);
    if (found == nullptr && !(seen_before(hash) && failures_ < kMostFailures && has_room()))
      return false;
    int capturing = 0;
    if (cuda_.is_capturing(stream, &capturing) || capturing) return false;
    if (found == nullptr && (found = make(hash, addresses, launches)) == nullptr) {
      ++failures_;
      return false;
    }
    found->used = calls_;
    return cuda_.launch(found->exec, stream) == 0;
  }

  static constexpr size_t kMost = 64;
  static constexpr uint64_t kLongUnused = 16 * kMost;  // calls
  static constexpr int kMostFailures = 16;             // then launches stay as they are
  static constexpr int kRelaxed = 2;                   // CU_STREAM_CAPTURE_MODE_RELAXED
  static constexpr int kUnknown = 999;                 // CUDA_ERROR_UNKNOWN
  static constexpr unsigned kNonBlocking = 1;          // CU_STREAM_NON_BLOCKING

  struct Made {
    uint64_t hash, used;
    Addresses addresses;
    void* exec;
  };

  static uint64_t hash_of(const Addresses& addresses) {
    uint64_t hash = addresses.size();
    for (uint64_t each : addresses) hash = c10::hash_combine(hash, each);
    return hash;
  }

  Made* find(uint64_t hash, const Addresses& addresses) {
    for (Made& each : made_)
      if (each.hash == hash && each.addresses == addresses) return &each;
    return nullptr;
  }

  bool seen_before(uint64_t hash) {
    for (uint64_t each : seen_)
      if (each == hash) return true;
    seen_[calls_ % kMost] = hash;
    return false;
  }

  Made& oldest() {
    return *std::min_element(made_.begin(), made_.end(),
                             [](const Made& a, const Made& b) { return a.used < b.used; });
  }

  bool has_room() { return made_.size() < kMost || calls_ - oldest().used > kLongUnused; }

  // Null where CUDA makes none.
  Made* make(uint64_t hash, const Addresses& addresses, const Launches& launches) {
    if (made_.empty()) made_.reserve(kMost);
    Made* const room = made_.size() < kMost ? nullptr : &oldest();
    Made made{hash, calls_, addresses, nullptr};
    // Waiting for memory is forbidden to all threads while one captures, unless they are relaxed.
    int mode = kRelaxed;
    if (cuda_.exchange_capture_mode(&mode)) return nullptr;
    made.exec = captured(launches);
    cuda_.exchange_capture_mode(&mode);
    if (made.exec == nullptr) return nullptr;
    if (room == nullptr) return &made_.emplace_back(std::move(made));
    cuda_.destroy_exec(room->exec);
    *room = std::move(made);
    return room;
  }

  // To a CUresult. What raises here raises again, or does not, where the steps are launched instead.
  static int tried(const Launches& launches, void* stream) noexcept {
    try {
      return launches(stream);
    } catch (...) {
      return kUnknown;
    }
  }

  // On a stream of its own, as PyTorch's default one cannot be captured.
  void* captured(const Launches& launches) {
    void *stream = nullptr, *graph = nullptr, *exec = nullptr;
    if (cuda_.create_stream(&stream, kNonBlocking)) return nullptr;
    if (cuda_.begin_capture(stream, kRelaxed) == 0) {
      const int status = tried(launches, stream);
      if (cuda_.end_capture(stream, &graph) == 0) {
        if (status || cuda_.instantiate(&exec, graph, 0)) exec = nullptr;
        cuda_.destroy(graph);
      }
    }
    cuda_.destroy_stream(stream);
    return exec;
  }

  const GraphFunctions cuda_;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::vector<Made> made_;
  std::array<uint64_t, kMost> seen_{};
  uint64_t calls_ = 0;
  int failures_ = 0;
};

}  // namespace epinorm
