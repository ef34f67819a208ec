// What the kernels for CPU share: XLA's FFI in C alone, so that they compile in a second, and its threads.

#ifndef JAXSERVE_PALLAS_KERNELS_NATIVE_FFI_H_
#define JAXSERVE_PALLAS_KERNELS_NATIVE_FFI_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/c_api.h"

namespace jaxserve {

// Whether XLA only asks which version of its interface a kernel was built for; answers it.
inline bool AnswersMetadata(XLA_FFI_CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return false;
  auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

inline XLA_FFI_Error* Fail(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

inline const XLA_FFI_Buffer& Operand(const XLA_FFI_CallFrame* frame, int64_t index) {
  return *static_cast<const XLA_FFI_Buffer*>(frame->args.args[index]);
}

inline const XLA_FFI_Buffer& Result(const XLA_FFI_CallFrame* frame, int64_t index = 0) {
  return *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[index]);
}

template <typename T>
T* Data(const XLA_FFI_Buffer& buffer) {
  return static_cast<T*>(buffer.data);
}

// Pieces of work, a run of neighbours for each thread: memory is read fastest in one direction. A thread that has
// come to the end of its own helps with those of the others.
class Job {
 public:
  // Those that a thread takes.
  class Pieces {
   public:
    Pieces(Job* job, int64_t own) : job_(job), own_(own) {}

    template <typename F>
    void ForEach(const F& work) const {
      for (int64_t i = 0; i < job_->num_runs_; ++i) {
        Run& run = job_->runs_[(own_ + i) % job_->num_runs_];
        for (int64_t piece; (piece = run.next.fetch_add(1)) < run.end; job_->num_done_.fetch_add(1)) work(piece);
      }
    }

   private:
    Job* job_;
    int64_t own_;
  };

  Job(int64_t num_pieces, int64_t num_threads, std::function<void(const Pieces&)> work)
      : num_runs_(num_threads), num_pieces_(num_pieces), work_(std::move(work)), runs_(new Run[num_threads]) {
    for (int64_t i = 0; i < num_runs_; ++i) {
      runs_[i].next = num_pieces * i / num_runs_;
      runs_[i].end = num_pieces * (i + 1) / num_runs_;
    }
  }

  void Help() {
    if (!Done()) work_(Pieces{this, num_helpers_.fetch_add(1)});
  }

  bool Done() const { return num_done_.load(std::memory_order_acquire) == num_pieces_; }

 private:
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };

  const int64_t num_runs_, num_pieces_;
  const std::function<void(const Pieces&)> work_;
  const std::unique_ptr<Run[]> runs_;
  std::atomic<int64_t> num_helpers_{0}, num_done_{0};
};

// Where a thread that has just helped finds the next job: for a short while it looks here before it goes back to
// XLA's pool and to sleep, since waking takes as long as many a job does.
class Relay {
 public:
  static Relay& Shared() {
    static auto* relay = new Relay;  // Never destroyed: threads of XLA's pool may outlive everything.
    return *relay;
  }

  // Whoever looks out for a job takes part in this one; returns how many do.
  int64_t Offer(const std::shared_ptr<Job>& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      latest_ = job;
    }
    offered_.fetch_add(1, std::memory_order_release);
    return looking_.load(std::memory_order_acquire);
  }

  // Takes part in a job, and in those offered within kPatience of the last one's end.
  void Help(std::shared_ptr<Job> job) {
    looking_.fetch_add(1);
    for (uint64_t seen = offered_.load(std::memory_order_acquire); job != nullptr; job = Next(&seen)) job->Help();
    looking_.fetch_sub(1);
  }

 private:
  static constexpr std::chrono::microseconds kPatience{100};

  std::shared_ptr<Job> Next(uint64_t* seen) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    for (uint64_t offered; (offered = offered_.load(std::memory_order_acquire)) == *seen; std::this_thread::yield())
      if (std::chrono::steady_clock::now() > end) return nullptr;
    *seen = offered_.load(std::memory_order_acquire);
    const std::lock_guard<std::mutex> lock(mutex_);
    return latest_;
  }

  std::mutex mutex_;
  std::shared_ptr<Job> latest_;
  std::atomic<uint64_t> offered_{0};
  std::atomic<int64_t> looking_{0};
};

// Pieces 0 to num_pieces - 1 for this thread and for those of XLA's pool that are free, each of which calls `work`
// once with what it is to take. A thread that comes after the last piece was taken finds nothing to do, so nobody
// waits for one that has not begun.
inline void Share(XLA_FFI_CallFrame* frame, int64_t num_pieces, std::function<void(const Job::Pieces&)> work) {
  int64_t num_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count{};
  count.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  count.ctx = frame->ctx;
  count.num_threads = &num_threads;
  frame->api->XLA_FFI_ThreadPool_NumThreads(&count);
  const int64_t most = std::min(num_threads, num_pieces);
  const auto job = std::make_shared<Job>(num_pieces, most, std::move(work));
  for (int64_t helper = 1 + (most > 1 ? Relay::Shared().Offer(job) : 0); helper < most; ++helper) {
    XLA_FFI_ThreadPool_Schedule_Args task{};
    task.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    task.ctx = frame->ctx;
    task.task = [](void* data) {
      std::unique_ptr<std::shared_ptr<Job>> job(static_cast<std::shared_ptr<Job>*>(data));
      Relay::Shared().Help(*job);
    };
    task.data = new std::shared_ptr<Job>(job);
    frame->api->XLA_FFI_ThreadPool_Schedule(&task);
  }
  job->Help();
  while (!job->Done()) std::this_thread::yield();
}

// work(0) to work(num_pieces - 1), shared out as above.
template <typename F>
void ParallelFor(XLA_FFI_CallFrame* frame, int64_t num_pieces, F work) {
  Share(frame, num_pieces, [work = std::move(work)](const Job::Pieces& pieces) { pieces.ForEach(work); });
}

// Rows of an array, all its axes but the last.
inline int64_t NumRows(const XLA_FFI_Buffer& array) {
  int64_t num_rows = 1;
  for (int64_t axis = 0; axis + 1 < array.rank; ++axis) num_rows *= array.dims[axis];
  return num_rows;
}

// work(0) to work(num_rows - 1), rows that cost about as much as copying so many numbers each: on other threads
// too where there is enough to do that waking them pays.
template <typename F>
void ForRows(XLA_FFI_CallFrame* frame, int64_t num_rows, int64_t row_cost, const F& work) {
  constexpr int64_t kPiece = 1 << 13;  // numbers
  const int64_t together = std::max<int64_t>(1, kPiece / row_cost), num_pieces = (num_rows + together - 1) / together;
  const auto piece = [&](int64_t number) {
    const int64_t end = std::min(num_rows, (number + 1) * together);
    for (int64_t row = number * together; row < end; ++row) work(row);
  };
  if (num_rows * row_cost >= 4 * kPiece) return ParallelFor(frame, num_pieces, piece);
  for (int64_t number = 0; number < num_pieces; ++number) piece(number);
}

}  // namespace jaxserve

#endif  // JAXSERVE_PALLAS_KERNELS_NATIVE_FFI_H_
