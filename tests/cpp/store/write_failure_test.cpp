// A disk that fills up at any write: an error that says so, nothing torn, and the next run goes on.
#include <gtest/gtest.h>

#include "nybble/convert.h"
#include "store/checkpoint_builder.h"
#include "store/full_disk.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;

class FullDisk : public ::testing::TestWithParam<int64_t> {
 protected:
  ~FullDisk() override { full_disk::lift(); }
};

TEST_P(FullDisk, LosesNothingAndResumes) {
  const TemporaryFolder folder;
  write_tiny_checkpoint(folder / "source");
  quantize_checkpoint(folder / "source", folder / "expected", {});
  const int cuts_before = full_disk::cuts();
  full_disk::set_budget(GetParam());
  try {
    quantize_checkpoint(folder / "source", folder / "store", {});
    FAIL() << "the disk was not full";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_NE(std::string(error.what()).find("No space left on device"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("bytes free"), std::string::npos) << error.what();
  }
  EXPECT_EQ(full_disk::cuts() - cuts_before, GetParam() > 0 ? 1 : 0) << "control: a write was cut";
  EXPECT_FALSE(fs::exists(folder / "store"));
  ASSERT_TRUE(incomplete_note(folder / "store"));
  for (const auto& entry : fs::recursive_directory_iterator(folder / "store.partial")) {
    EXPECT_NE(entry.path().extension(), ".tmp");
    if (entry.path().extension() == ".safetensors") {
      EXPECT_NO_THROW(SafetensorsFile{entry.path()}) << "a torn file";
    }
  }
  full_disk::lift();
  quantize_checkpoint(folder / "source", folder / "store", {});
  for (const auto& entry : fs::directory_iterator(folder / "expected")) {
    EXPECT_EQ(read_text(entry.path()), read_text(folder / "store" / entry.path().filename().string())) << entry.path();
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, FullDisk, ::testing::Values(0, 1, 100, 1000, 5000, 6000, 9000, 12000, 20000, 22000));

}  // namespace
}  // namespace nybble
