// offloadd/device_status.h
//
// What a device has counted, as a message for offloadctl status.
//
// Thread safety: the device's thread.
#pragma once

#include <string>

#include "aio/device.h"
#include "proto/offload.pb.h"

namespace offload::daemon {

// `file` says what is on the device: "store" or "scratch".
proto::v1::DeviceStatus DescribeDevice(const std::string& file, const aio::Device& device);

}  // namespace offload::daemon
