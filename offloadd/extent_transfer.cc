#include "offloadd/extent_transfer.h"

#include <array>
#include <utility>

namespace offload::daemon {

ExtentUpdate DescribeExtent(const JobContext& context, uint32_t store_tensor, uint32_t index,
                            std::span<const MemberUpdate> members) {
  const proto::StoreTensor& tensor = context.store_tensor(store_tensor);
  ExtentUpdate update;
  update.store = context.store;
  update.store_tensor = store_tensor;
  update.index = index;
  update.begin = uint64_t{index} * proto::kExtentElements;
  update.elements = proto::ExtentElements(tensor.element_count, index);
  update.dtype = tensor.dtype;
  update.plane_set = &tensor.planes;
  if (context.square_roots != nullptr) update.roots = context.square_roots->corrections();
  update.sequence = context.store->open_sequence();
  update.members = members;
  return update;
}

uint32_t ReadPlanes(JobContext& context, const PlaneFlags& wanted, ExtentUpdate& update,
                    const std::function<void(absl::Status)>& done) {
  std::array<swap::ReadRequest, proto::kUpdatedPlanes.size()> requests;
  std::array<proto::Plane, requests.size()> plane_of{};
  size_t count = 0;
  for (const proto::Plane plane : proto::kUpdatedPlanes) {
    if (!wanted[plane] || update.planes[plane].bytes == nullptr) continue;
    requests[count] = {ExtentIdOf(update.store_tensor, plane, update.index),
                       update.planes[plane].bytes};
    plane_of[count++] = plane;
  }
  if (count == 0) return 0;
  std::array<swap::Stamp, requests.size()> stamps;
  context.store->Read({requests.data(), count}, {stamps.data(), count}, context.Counted(done));
  for (size_t i = 0; i < count; ++i) update.planes[plane_of[i]].stamp = stamps[i];
  return 1;
}

absl::StatusOr<uint32_t> ReadTies(JobContext& context, const ResidentState& state,
                                  ExtentUpdate& update,
                                  const std::function<void(absl::Status)>& done) {
  if (update.planes[proto::Plane::kResidual].bytes == nullptr) return 0;
  const swap::Stamp stamp = state.TieStamp(update.store_tensor, update.index);
  update.ties_in.word = stamp.word;
  if ((stamp.flags & swap::kFlagTiesPlane) == 0) return 0;
  const swap::ExtentId id{update.store_tensor, swap::Plane::kTies, update.index};
  absl::StatusOr<MappedRegion> memory = MappedRegion::Anonymous(context.store->ExtentBytes(id));
  if (!memory.ok()) return memory.status();
  update.ties_in.plane = *std::move(memory);
  const swap::ReadRequest request{id, update.ties_in.plane->data()};
  swap::Stamp ties_stamp;
  context.store->Read({&request, 1}, {&ties_stamp, 1}, context.Counted(done));
  update.ties_in.stamp = ties_stamp;
  return 1;
}

std::vector<swap::WriteRequest> WritesOf(const ExtentUpdate& update) {
  std::vector<swap::WriteRequest> requests;
  for (const proto::Plane plane : proto::kUpdatedPlanes) {
    if (update.planes[plane].bytes == nullptr || update.left[plane]) continue;
    swap::WriteRequest& request = requests.emplace_back();
    request = {ExtentIdOf(update.store_tensor, plane, update.index), update.planes[plane].bytes,
               update.crc[plane]};
    if (plane != proto::Plane::kResidual) continue;
    request.word = update.ties_out.word;
    request.flags = update.ties_out.plane.has_value() ? swap::kFlagTiesPlane : 0;
  }
  if (update.ties_out.plane.has_value()) {
    const swap::ExtentId id{update.store_tensor, swap::Plane::kTies, update.index};
    swap::Checksum checksum = update.store->StartChecksum(id, update.store->open_sequence());
    checksum.Update(update.ties_out.plane->span());
    requests.push_back({id, update.ties_out.plane->data(), checksum.Finish()});
  }
  return requests;
}

}  // namespace offload::daemon
