// Opening a checkpoint: one file, shards behind an index, names that share a tensor, and indexes that lie.
#include <gtest/gtest.h>

#include "store/checkpoint_builder.h"

namespace nybble {
namespace {

const Entry kOne = {"F32", {1}, "abcd"};
const Entry kTwo = {"F32", {1}, "efgh"};

std::string index_of(const std::map<std::string, std::string>& weight_map) {
  std::string json = R"({"metadata": {"total_size": 8}, "weight_map": {)";
  for (const auto& [tensor, file] : weight_map) json += (json.back() == '{' ? "\"" : ", \"") + tensor + "\": \"" + file + "\"";
  return json + "}}";
}

class CheckpointFolder : public ::testing::Test {
 protected:
  void write_shards() {
    write_safetensors(folder_ / "model-00001-of-00002.safetensors", {{"layers.10.w", kOne}});
    write_safetensors(folder_ / "model-00002-of-00002.safetensors", {{"layers.9.w", kTwo}});
    write_text(folder_ / "model.safetensors.index.json",
               index_of({{"layers.10.w", "model-00001-of-00002.safetensors"}, {"layers.9.w", "model-00002-of-00002.safetensors"}}));
  }
  // Faults of the folder, and that the throwing constructor agrees.
  Faults faults() {
    Faults found;
    const Checkpoint checkpoint(folder_.path(), found);
    if (found.empty()) {
      EXPECT_NO_THROW(Checkpoint{folder_.path()});
    } else {
      EXPECT_THROW(Checkpoint{folder_.path()}, Error);
    }
    return found;
  }
  TemporaryFolder folder_;
};

TEST_F(CheckpointFolder, JoinsShardsInNaturalOrder) {
  write_shards();
  EXPECT_TRUE(faults().empty());
  const Checkpoint checkpoint(folder_.path());
  ASSERT_EQ(checkpoint.tensors().size(), 2);
  EXPECT_EQ(checkpoint.tensors()[0]->name, "layers.9.w");
  const TensorView* found = checkpoint.find("layers.10.w");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(std::memcmp(found->bytes.data(), "abcd", 4), 0);
  EXPECT_EQ(checkpoint.file_of(*found).path().filename(), "model-00001-of-00002.safetensors");
  EXPECT_EQ(checkpoint.find("layers.1.w"), nullptr);
}

TEST_F(CheckpointFolder, OpensOneFileByNameAndByFolder) {
  write_safetensors(folder_ / "model.safetensors", {{"a", kOne}});
  EXPECT_NE(Checkpoint(folder_.path()).find("a"), nullptr);
  EXPECT_NE(Checkpoint(folder_ / "model.safetensors").find("a"), nullptr);
  EXPECT_EQ(Checkpoint(folder_ / "model.safetensors").folder(), folder_.path());
}

TEST_F(CheckpointFolder, SharedTensorsAreFoundUnderEveryName) {
  write_safetensors(folder_ / "model.safetensors", {{"embed", kOne}, {"other", kTwo}},
                    {{"format", "pt"}, {"head", "embed"}, {"lost", "nowhere"}, {"other", "embed"}});
  const Checkpoint checkpoint(folder_.path());
  EXPECT_EQ(checkpoint.find("head"), checkpoint.find("embed"));
  EXPECT_EQ(checkpoint.find("lost"), nullptr);
  EXPECT_EQ(std::memcmp(checkpoint.find("other")->bytes.data(), "efgh", 4), 0) << "a stored tensor wins over an alias";
  EXPECT_EQ(checkpoint.aliases().size(), 1);
}

TEST_F(CheckpointFolder, NothingThereIsAnError) {
  EXPECT_THROW(Checkpoint(folder_ / "missing"), Error);
  EXPECT_THROW(Checkpoint{folder_.path()}, Error);
  write_text(folder_ / "model.safetensors", "");
  EXPECT_EQ(faults().size(), 1);
}

TEST_F(CheckpointFolder, MissingAndBrokenShardsAreAllNoted) {
  write_shards();
  write_text(folder_ / "model.safetensors.index.json", index_of({{"layers.10.w", "model-00001-of-00002.safetensors"},
                                                                 {"layers.9.w", "model-00002-of-00002.safetensors"},
                                                                 {"x", "gone.safetensors"}}));
  std::filesystem::resize_file(folder_ / "model-00002-of-00002.safetensors", 20);
  const Faults found = faults();
  ASSERT_EQ(found.size(), 2);
  EXPECT_NE(to_string(found[0]).find("gone.safetensors"), std::string::npos);
  EXPECT_NE(to_string(found[1]).find("model-00002-of-00002"), std::string::npos);
}

struct BadIndex {
  const char* name;
  std::string json;
  size_t faults;
  const char* message;
};
const BadIndex kBadIndexes[] = {
    {"not_json", "{", 1, "weight_map"},
    {"no_weight_map", "{}", 1, "weight_map"},
    {"weight_map_is_a_list", R"({"weight_map": []})", 1, "weight_map"},
    {"file_is_a_number", R"({"weight_map": {"layers.10.w": 7}})", 1, "the name of a file"},
    {"file_leads_out", index_of({{"layers.10.w", "../model-00001-of-00002.safetensors"}}), 1, "the name of a file"},
    {"file_is_absolute", index_of({{"layers.10.w", "/etc/passwd"}}), 1, "the name of a file"},
    {"tensor_in_another_shard",
     index_of({{"layers.10.w", "model-00002-of-00002.safetensors"}, {"layers.9.w", "model-00001-of-00002.safetensors"}}), 2,
     "does not hold it"},
    {"tensor_nowhere",
     index_of({{"layers.10.w", "model-00001-of-00002.safetensors"},
               {"layers.9.w", "model-00002-of-00002.safetensors"},
               {"x", "model-00001-of-00002.safetensors"}}),
     1, "x is said to be in"},
    {"tensor_unlisted", index_of({{"layers.10.w", "model-00001-of-00002.safetensors"}, {"layers.8.w", "model-00002-of-00002.safetensors"}}),
     2, "layers."},
};

class LyingIndex : public CheckpointFolder, public ::testing::WithParamInterface<BadIndex> {};

TEST_P(LyingIndex, IsNoted) {
  write_shards();
  EXPECT_TRUE(faults().empty()) << "the good twin";
  write_text(folder_ / "model.safetensors.index.json", GetParam().json);
  const Faults found = faults();
  ASSERT_EQ(found.size(), GetParam().faults);
  EXPECT_NE(to_string(found[0]).find(GetParam().message), std::string::npos) << to_string(found[0]);
}

INSTANTIATE_TEST_SUITE_P(Table, LyingIndex, ::testing::ValuesIn(kBadIndexes), [](const auto& info) { return info.param.name; });

TEST_F(CheckpointFolder, OneNameInTwoShardsIsNoted) {
  write_shards();
  write_safetensors(folder_ / "model-00002-of-00002.safetensors", {{"layers.9.w", kTwo}, {"layers.10.w", kTwo}});
  const Faults found = faults();
  ASSERT_EQ(found.size(), 1);
  EXPECT_NE(to_string(found[0]).find("each name in one shard"), std::string::npos);
}

}  // namespace
}  // namespace nybble
