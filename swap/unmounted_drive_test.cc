#include "swap/unmounted_drive.h"

#include <gtest/gtest.h>

namespace offload::swap {
namespace {

constexpr char kFstab[] =
    "# <file system> <mount point> <type> <options> <dump> <pass>\n"
    "UUID=1 / ext4 errors=remount-ro 0 1\n"
    "UUID=2 none swap sw 0 0\n"
    "/dev/nvme0n1 /nvme0 xfs noauto 0 2\n"
    "/dev/nvme1n1 /mnt/my\\040drive/ ext4 defaults 0 2\n"
    "/dev/sda1 /data ext4 defaults 0 2\n"
    "/dev/nvme2n1 /data/fast ext4 defaults 0 2\n";
constexpr char kRoot[] = "/dev/vda1 / ext4 rw 0 0\nproc /proc proc rw 0 0\n";

std::string Unmounted(const std::string& path, const std::string& mounts) {
  return UnmountedAbove(path, kFstab, kRoot + mounts).value_or("");
}

TEST(UnmountedDrive, IsTheMountPointAtOrAboveThePool) {
  EXPECT_EQ(Unmounted("/nvme0", ""), "/nvme0");
  EXPECT_EQ(Unmounted("/nvme0/jobs/mine", ""), "/nvme0");
  EXPECT_EQ(Unmounted("/mnt/my drive/pool", ""), "/mnt/my drive");
  EXPECT_EQ(Unmounted("/data/fast/pool", "/dev/sda1 /data ext4 rw 0 0\n"), "/data/fast");
}

TEST(UnmountedDrive, ThereIsNoneWhereItIsMountedOrNotNamed) {
  EXPECT_EQ(Unmounted("/nvme0/pool", "/dev/nvme0n1 /nvme0 xfs rw 0 0\n"), "");
  EXPECT_EQ(Unmounted("/mnt/my drive/pool", "/dev/nvme1n1 /mnt/my\\040drive ext4 rw 0 0\n"), "");
  EXPECT_EQ(Unmounted("/nvme0/other/pool", "tmpfs /nvme0/other tmpfs rw 0 0\n"), "")
      << "something is mounted below";
  EXPECT_EQ(Unmounted("/data/pool", "/dev/sda1 /data ext4 rw 0 0\n"), "");
  EXPECT_EQ(Unmounted("/nvme01/pool", ""), "") << "another name";
  EXPECT_EQ(Unmounted("/home/me/pool", ""), "") << "on the drive of /";
}

TEST(UnmountedDrive, NothingIsSaidWithoutTables) {
  EXPECT_EQ(UnmountedAbove("/nvme0", "", kRoot), std::nullopt);
  EXPECT_EQ(UnmountedAbove("/nvme0", "not a table\n", kRoot), std::nullopt);
}

}  // namespace
}  // namespace offload::swap
