#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "nybble/c_api_stream.h"
#include "nybble/error.h"

namespace {

constexpr int64_t kBytes = 600;
constexpr int64_t kSlotBytes = 4096;

bool stopped_at_512(void*, int32_t, int32_t, int64_t begin, int64_t) { return begin == 512; }

// Two layers, one slot.
class StreamCApi : public ::testing::Test {
 protected:
  StreamCApi() {
    const char* const name = "packed";
    EXPECT_EQ(nybble_arena_new(&arena_), 0);
    for (int32_t index = 0; index < 2; index++) {
      int32_t layer = -1, layout = -1;
      int64_t offset = -1;
      EXPECT_EQ(nybble_arena_add_layer(arena_, &name, &kBytes, 1, &layer, &layout, &offset), 0);
      EXPECT_EQ(layer, index);
      EXPECT_EQ(layout, 0);
      EXPECT_EQ(offset, 0);
      const char* const weights[] = {"q", "k"};
      EXPECT_EQ(nybble_register_owner(index == 0 ? "L0" : "L1", weights, 2, &uids_[index]), 0);
    }
  }
  ~StreamCApi() override {
    nybble_ring_free(ring_);
    nybble_arena_free(arena_);
    for (const int64_t uid : uids_) nybble_forget_owner(uid);
  }
  void fill(int32_t layer) {
    const std::vector<uint8_t> bytes(kBytes, static_cast<uint8_t>(10 + layer));
    EXPECT_EQ(nybble_arena_fill(arena_, layer, 0, 0, bytes.data(), kBytes), 0);
  }
  int make_ring(nybble_ring_options options = {}) {
    void* const slots[] = {slot_};
    return nybble_ring_new(arena_, uids_, slots, 1, kSlotBytes, &options, &ring_);
  }
  int acquire(int32_t layer) {
    int32_t landed = 0;
    int status = 0;
    while (status == 0 && landed == 0) status = nybble_ring_acquire(ring_, layer, 0, nullptr, 1000, &landed, &refilled_);
    return status;
  }
  int verify(int64_t uid) {
    const void* const pointers[] = {slot_, slot_ + kBytes - 1};
    return nybble_verify_owner(uid, pointers, 2);
  }
  static int kind(nybble::ErrorKind kind) { return 1 + static_cast<int>(kind); }

  nybble_arena* arena_ = nullptr;
  nybble_ring* ring_ = nullptr;
  int64_t uids_[2] = {};
  alignas(4096) uint8_t slot_[kSlotBytes] = {};
  uint64_t refilled_ = 0;
};

TEST_F(StreamCApi, StreamsBothLayersThroughOneSlot) {
  fill(0);
  fill(1);
  ASSERT_EQ(make_ring(), 0);
  for (const int32_t layer : {0, 1, 0}) {
    refilled_ = 0;
    ASSERT_EQ(acquire(layer), 0);
    EXPECT_EQ(refilled_, 1u);
    EXPECT_EQ(slot_[kBytes - 1], 10 + layer);
    EXPECT_EQ(verify(uids_[layer] + 1), 0);
    EXPECT_NE(verify(uids_[1 - layer] + 1), 0);
    EXPECT_EQ(
        std::string(nybble_last_error()).find(layer == 0 ? "weight L1.k expected, slot holds L0" : "weight L0.k expected, slot holds L1"),
        0u);
    EXPECT_EQ(nybble_last_error_kind(), static_cast<int>(nybble::ErrorKind::kStaleWeight));
    EXPECT_EQ(nybble_ring_release(ring_, layer, nullptr), 0);
  }
  nybble_slot_status status;
  ASSERT_EQ(nybble_ring_status(ring_, 0, &status), 0);
  EXPECT_EQ(status.state, 3);
  EXPECT_EQ(status.layer, 0);
  EXPECT_EQ(status.owner, uids_[0]);
  EXPECT_EQ(status.generation, 3u);
  nybble_ring_stats stats;
  ASSERT_EQ(nybble_ring_get_stats(ring_, &stats), 0);
  EXPECT_EQ(stats.visits, 3);
  EXPECT_EQ(stats.refills, 3);
}

TEST_F(StreamCApi, AnObserverStopsARefillAndIncompleteLayersAreRefused) {
  fill(0);
  EXPECT_NE(make_ring(), 0);
  EXPECT_NE(std::string(nybble_last_error()).find("layer 1, part packed: not all of its 600 bytes"), std::string::npos);
  fill(1);
  nybble_ring_options options = {};
  options.chunk_bytes = 512;
  options.observer = [](void* context, int32_t layer, int32_t slot, int64_t begin, int64_t end) -> int32_t {
    return stopped_at_512(context, layer, slot, begin, end);
  };
  ASSERT_EQ(make_ring(options), 0);
  EXPECT_EQ(acquire(1), kind(nybble::ErrorKind::kIo));
  EXPECT_NE(verify(uids_[1]), 0);
  EXPECT_NE(std::string(nybble_last_error()).find("slot holds nothing"), std::string::npos);
}

TEST_F(StreamCApi, NullsAndBadCodesAreErrorsAndNeverCrash) {
  EXPECT_EQ(nybble_arena_new(nullptr), kind(nybble::ErrorKind::kValue));
  EXPECT_NE(nybble_register_owner(nullptr, nullptr, 0, uids_), 0);
  EXPECT_NE(nybble_register_owner("x", nullptr, 2, uids_), 0);
  EXPECT_NE(nybble_register_slot(nullptr, nullptr, 1, uids_), 0);
  EXPECT_NE(nybble_verify_owner(1, nullptr, 1), 0);
  EXPECT_NE(nybble_arena_fill(arena_, 0, 0, 0, nullptr, 8), 0);
  EXPECT_NE(nybble_arena_fill(arena_, 0, 0, 0, slot_, -1), 0);
  EXPECT_NE(nybble_ring_new(arena_, nullptr, nullptr, 1, 8, nullptr, &ring_), 0);
  EXPECT_NE(nybble_ring_acquire(nullptr, 0, 0, nullptr, 1, nullptr, nullptr), 0);
  fill(0);
  fill(1);
  ASSERT_EQ(make_ring(), 0);
  int32_t landed = 0;
  EXPECT_NE(nybble_ring_acquire(ring_, 0, 3, nullptr, 1, &landed, nullptr), 0);
  EXPECT_NE(nybble_ring_acquire(ring_, 2, 0, nullptr, 1, &landed, nullptr), 0);
}

TEST_F(StreamCApi, APartIsFilledFromATensorOfACheckpoint) {
  const auto path = std::filesystem::temp_directory_path() / ("nybble-" + std::to_string(getpid()) + ".safetensors");
  std::string header =
      R"({"good":{"dtype":"U8","shape":[600],"data_offsets":[0,600]},"short":{"dtype":"U8","shape":[8],"data_offsets":[600,608]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t size = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << header << std::string(600, 'g') << std::string(8, 's');
  file.close();
  nybble_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(nybble_checkpoint_open(path.c_str(), &checkpoint), 0) << nybble_last_error();
  EXPECT_EQ(nybble_arena_fill_tensor(arena_, 0, 0, checkpoint, "good"), 0) << nybble_last_error();
  EXPECT_EQ(nybble_arena_fill_tensor(arena_, 1, 0, checkpoint, "short"), kind(nybble::ErrorKind::kFormat)) << nybble_last_error();
  EXPECT_EQ(nybble_arena_fill_tensor(arena_, 1, 0, checkpoint, "none"), kind(nybble::ErrorKind::kValue));
  nybble_checkpoint_close(checkpoint);
  std::filesystem::remove(path);
  EXPECT_NE(nybble_checkpoint_open(path.c_str(), &checkpoint), 0);
  fill(1);
  ASSERT_EQ(make_ring(), 0);
  ASSERT_EQ(acquire(0), 0);
  EXPECT_EQ(slot_[0], 'g');
  EXPECT_EQ(slot_[kBytes - 1], 'g');
}

}  // namespace
