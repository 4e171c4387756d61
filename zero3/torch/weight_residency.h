// zero3/torch/weight_residency.h
//
// A parameter whose weights are in the daemon: read from the job's slab, written in a private copy
// that is put back. Until the job's store is sealed the weights are what the parameter held when it
// was attached; the first operator that touches it has the store sealed.
//
// Thread safety: as Residency.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/given_memory.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/wait_graph.h"

namespace offload::zero3 {

class BornResidency;

class WeightResidency final : public Residency, public RawOwner, public RawUser, public LatePut {
 public:
  WeightResidency(std::shared_ptr<Attachment> attachment, uint32_t tensor, const std::string& name,
                  c10::Device device, size_t size_bytes, std::byte* home);

  uint32_t tensor() const { return tensor_; }
  const Attachment* attachment() const { return attachment_.get(); }
  bool closed();

  // ---- Before the store is sealed ----
  // Takes the storage of the parameter over, and keeps what it held: its bytes, or those that
  // `values`, of the host, has for one of a device (device_move.h).
  void Adopt(c10::StorageImpl* storage, c10::Storage values = {});
  // Of one that was not started; none when it kept bytes of its own.
  c10::Storage TakeValues();
  // Copies bytes [begin, begin + length) of that to `target`, which lies in the region; both as in
  // the daemon's extents.
  absl::Status ReadInitial(uint64_t begin, uint64_t length, std::byte* target);
  // The daemon has the weights: frees what the storage held. `goes_on`: with masters of a job that
  // exists.
  void Start(bool goes_on);

  void Pin(Access access) override;
  void Unpin(Completion* done) override;
  void Abandon() override;
  // A tensor over the storage that the program knows as a parameter.
  void AddParameter(const at::Tensor& tensor) {
    parameters_.push_back(tensor.unsafeGetTensorImpl());
    versions_.push_back(tensor.unsafeGetTensorImpl()->version_counter());
  }
  // torch::load and set_data() put a tensor in the place of the parameter: its values are taken.
  bool Serve(Special special, torch::jit::Stack* stack) override;
  uint64_t window_bytes() const override;
  bool BeginHolding(size_t count, uint64_t size_bytes) override {
    return attachment_->BeginHolding(count, size_bytes);
  }
  void EndHolding() override { attachment_->EndHolding(); }

  // ---- Raw pointers ----
  void ServeRaw(bool writes) override;
  bool EndRaw(bool wait) override;
  size_t raw_bytes() const override { return raw_.size_bytes(); }
  const std::string& raw_name() const override { return subject_; }

  // From now on set_data() replaces storages: the Python package watches `p.data = x` itself, and
  // copies the values before the next step.
  static void LeaveData() { takes_data_ = false; }
  // Who has the memory that set_data() gave the parameter has the parameter's, in plain torch: what
  // was written there becomes the weight. Throws OFD-1601 where that cannot be: it was written, or
  // the parameter is about to be and the program still has the memory.
  void SettleGiven(bool writes);
  // The same for memory that the program has given otherwise: `own`, over the storage of the
  // parameter, takes the values of `data`, and its memory. False, and nothing is done, where that
  // cannot be.
  bool Share(const at::Tensor& own, const at::Tensor& data);
  // It has other memory from now on. Returns what it had, whose values it has; or null.
  std::unique_ptr<GivenMemory> ForgetGiven();
  // The daemon has changed the weight: that memory gets it.
  void RefreshGiven();

  void MakeRoomToWrite() override;
  void BeginPut() override;
  void EndPut() override;

  // ---- Masters follow edits ----
  // A step is about to update it: its master becomes the weight when the tensor's version says that
  // it was written, however it was. Returns the master to put, fp32 in the order of memory, when an
  // edit that no version tells of was taken back by another: in memory the master is what it was.
  // OFD-1601 when there was no room to keep that. Of several ranks all call it; those after the
  // first, which have no master, get an empty one, whose put they follow.
  std::optional<std::vector<float>> FollowEdits();
  // Whether FollowEdits() would make the weight its master.
  bool IsItsMaster() const;
  // The step was taken, or the tensor's version was changed because of it.
  void Stepped();

  // Waits until nobody uses it; from then on Pin() throws OFD-1802. The attachment's session may
  // end after it. A parameter in memory that was not started gets its bytes back.
  // The others get `bytes` when there are some.
  void Close(c10::DataPtr bytes = {});

 private:
  // kWritten: nobody uses it, and the staging buffer has what is put or about to be (LatePut).
  enum class State : uint8_t { kInitial, kHome, kMoving, kReading, kWriting, kWritten };
  using Lock = std::unique_lock<std::mutex>;

  ~WeightResidency() override;
  static std::atomic<bool> takes_data_;

  bool IsParameter(const at::Tensor& tensor) const;
  class LeftCopy;
  void TakeData(const at::Tensor& parameter, const at::Tensor& data);
  void BecomeAlias(const at::Tensor& parameter, const at::Tensor& data);
  bool TakeTensor(at::Tensor target, const at::Tensor& source);
  [[noreturn]] void RefuseMemory(bool is_offloaded) const;
  // ---- In each other's memory (weight_exchange.cc) ----
  static WeightResidency* AwayWith(const at::Tensor& parameter);
  WeightResidency* Partner(const at::Tensor& data) const;
  void GoTo(WeightResidency* host, const at::Tensor& parameter);
  void ComeHome(const at::Tensor& parameter);
  void BeAlone(const at::Tensor& parameter);
  void Exchange(WeightResidency& other, at::ScalarType type);
  void PutOver(const at::Tensor& parameter, c10::Storage storage) const;
  c10::Storage ForgetPlace();
  void MoveHome(std::byte* home, std::unique_ptr<LeftCopy> left, c10::DataPtr shared);
  std::unique_ptr<GivenMemory> NoteGiven(const at::Tensor& data);
  void KeepGiven(std::unique_ptr<GivenMemory> given);
  bool MayLeave() const;
  bool MayFollow() const;
  bool HasGivenSince(bool writes);
  void TakeGiven(Lock& lock);
  void GiveBack(const std::byte* bytes);
  std::byte* BytesNow();
  bool PinRaw(Access access, Lock& lock);
  std::byte* CopyForHome() const;
  std::byte* TakeHome(Access access);
  void AddPin(Access access);
  void WaitForOthers(Lock& lock);
  std::byte* FetchForReading();
  std::byte* FetchForWriting(Access access);
  std::byte* FetchForWritingThere(Access access);
  void TakePinsBack();
  absl::Status EndUse();
  void RecordStream(const c10::Stream& stream);
  std::byte* MakePrivate(Access access);
  void LetGo(Lock& lock);
  void PutBack(Lock& lock);
  void TakeBack(Access access);
  void MoveWritten(Lock& lock, absl::FunctionRef<void()> action, State after);
  void EndPut(Lock& lock);
  void ForgetWritten();
  absl::Status PutRaw();
  // Whether an edit has a master to think of.
  bool HasMaster() const;
  uint64_t Version() const;
  // Of the thread that moves it.
  bool SeesVersion();
  struct Compared {
    bool is_same;
    uint32_t crc;  // of the job's
  };
  absl::StatusOr<bool> SeeHidden(const Compared& with_job);
  void ForgetHidden();
  Compared CompareWithJob(const std::byte* bytes);
  // Those of a value from `begin` on, good until the next call.
  using ReadBytes = absl::FunctionRef<const std::byte*(uint64_t begin, uint64_t size_bytes)>;
  absl::StatusOr<Compared> CompareInBlocks(ReadBytes bytes) const;
  absl::Status PutUnlessSame(ReadBytes bytes, uint64_t digest,
                             absl::FunctionRef<absl::Status()> put);
  uint32_t CrcInJob();
  bool PutStaged();
  void Follow();
  void NoteHidden(uint32_t crc_before, uint32_t crc_now);
  uint64_t TakeDigest(const std::byte* bytes);
  uint64_t TakeDigestThere(const std::byte* bytes);

  // Null for the memory of the host.
  DeviceMemory* device() const { return attachment_->device(); }
  absl::Status PutFromDevice();

  const std::shared_ptr<Attachment> attachment_;
  const uint32_t tensor_;
  const c10::Device torch_device_;
  WaitQueue changed_;
  State state_ = State::kInitial;
  bool closed_ = false;
  bool is_overwritten_ = false;  // by who writes it, without looking
  bool is_abandoned_ = false;    // and who has thrown
  int pins_ = 0;                 // operators between Pin() and Unpin()
  int uses_ = 0;                 // these, and those that an accelerator still runs: the bytes stay
  absl::InlinedVector<WaitGraph::Thread, 4> holders_;  // one per pin
  WaitGraph::Thread mover_;                            // kMoving
  std::byte* bytes_ = nullptr;                         // kReading, kWriting
  bool acquired_ = false;                              // the session's pin is ours
  Staging::Piece staging_;                             // kWriting, kWritten
  bool is_late_ = false;                               // the attachment knows of it as a LatePut
  std::vector<client::Ticket> put_;                    // of what is written, when that has begun
  bool is_compared_ = false;  // what is written is made from the old value, as on all ranks
  // kWriting, on a device: what is put back; of ranks after the first: what they write does not
  // count.
  c10::DataPtr private_;
  RawCopy raw_;  // at home; newer than the daemon's, and what operators use, while it is shown
  absl::InlinedVector<const c10::TensorImpl*, 1> parameters_;
  std::unique_ptr<GivenMemory> given_;  // what set_data() gave, while others may have it
  WaitGraph::Thread taker_;             // TakeGiven(): its pin looks no further
  bool gives_back_ = false;             // an operator has written, and that memory does not have it
  // set_data() has put the parameter over the storage of this one, which is another parameter's;
  // null: it is over its own.
  WeightResidency* away_ = nullptr;
  c10::Storage own_storage_;  // which nobody else may have meanwhile
  // Of the tensors that the program knows: what tells of a write, beside the bytes.
  absl::InlinedVector<c10::VariableVersion, 1> versions_;
  uint64_t version_then_ = 0;  // at the last step, or when what was written since became the master
  bool has_residual_ = false;  // the master may be another value than the weight
  // What the first edit since then, of which no version tells, has replaced.
  struct Hidden {
    uint32_t crc = 0;           // of the weight
    std::vector<float> master;  // empty where there is no room
  };
  std::optional<Hidden> hidden_;
  std::exception_ptr failure_;             // of what ended after its operator
  c10::DataPtr initial_;                   // kInitial
  c10::Storage initial_values_;            // in its place
  BornResidency* initial_born_ = nullptr;  // whose bytes initial_ or initial_values_ name
};

}  // namespace offload::zero3
