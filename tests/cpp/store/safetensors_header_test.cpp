// A header is either right in every respect or refused with words that name the fault.
#include "store/safetensors_header.h"

#include <gtest/gtest.h>

#include "nybble/error.h"
#include "store/checkpoint_builder.h"

namespace nybble {
namespace {

SafetensorsHeader parse(const std::string& file) { return parse_safetensors_header(std::as_bytes(std::span(file)), "f.safetensors"); }

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirBytes) {
  const auto header =
      parse(raw_safetensors(R"({"__metadata__":{"format":"pt"},"b":)" + tensor("F32", "[1]", "[6,10]") + R"(,"a":)" +
                                tensor("BF16", "[3,1]", "[0,6]") + R"(,"none":)" + tensor("U8", "[0,7]", "[10,10]") + "}   ",
                            std::string(10, 'x')));
  ASSERT_EQ(header.tensors.size(), 3);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[0].shape, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(header.tensors[1].begin, 6);
  EXPECT_EQ(header.tensors[2].end, 10);
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(parse(raw_safetensors("{}", "")).tensors.size(), 0);
}

struct Malformed {
  const char* name;
  std::string file;
  const char* message;  // a part of it
};

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets, size_t data = 4) {
  return raw_safetensors(R"({"t":)" + tensor(dtype, shape, offsets) + "}", std::string(data, 'x'));
}

std::string header_of(const std::string& json, size_t data = 4) { return raw_safetensors(json, std::string(data, 'x')); }

std::string with_length(uint64_t length, std::string file) {
  for (int i = 0; i < 8; i++) file[i] = static_cast<char>(length >> (8 * i) & 0xff);
  return file;
}

const std::string kGood = R"("t":)" + tensor("F32", "[1]", "[0,4]");

const Malformed kMalformed[] = {
    {"empty", "", "0 bytes"},
    {"length_cut_off", "\x01\x02\x03", "3 bytes"},
    {"length_beyond_the_file", with_length(1000, header_of("{" + kGood + "}")), "says it has 1000 bytes"},
    {"length_beyond_the_limit", with_length(100'000'001, header_of("{" + kGood + "}")), "at most 100000000"},
    {"length_all_ones", with_length(~0ull, header_of("{" + kGood + "}")), "at most 100000000"},
    {"length_zero", with_length(0, header_of("{}")), "not JSON"},
    {"header_cut_off", header_of("{" + kGood), "not JSON"},
    {"not_json", header_of("hello"), "not JSON"},
    {"not_utf8", header_of("{\"\xff\xfe\":" + tensor("F32", "[1]", "[0,4]") + "}"), "not JSON"},
    {"text_after_the_object", header_of("{" + kGood + "} x"), "not JSON"},
    {"top_is_an_array", header_of("[1]"), "an array"},
    {"top_is_a_number", header_of("7"), "a number"},
    {"deep_nesting", header_of("{\"t\":" + std::string(100000, '[') + std::string(100000, ']') + "}"), "an array"},
    {"deep_objects", header_of("{\"t\":{\"shape\":{\"a\":{}}}}"), "an object"},
    {"tensor_is_null", header_of("{\"t\":null}"), "null"},
    {"duplicate_tensor", header_of("{" + kGood + "," + kGood + "}"), "appears twice"},
    {"duplicate_field", header_of(R"({"t":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})"), "twice"},
    {"duplicate_metadata", header_of(R"({"__metadata__":{"a":"1","a":"2"},)" + kGood + "}"), "appears twice"},
    {"metadata_of_numbers", header_of(R"({"__metadata__":{"a":1},)" + kGood + "}"), "a number"},
    {"unknown_field", header_of(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}})"), "the field \"strides\""},
    {"missing_dtype", header_of(R"({"t":{"shape":[1],"data_offsets":[0,4]}})"), "not all of"},
    {"missing_offsets", header_of(R"({"t":{"dtype":"F32","shape":[1]}})"), "not all of"},
    {"unknown_dtype", one("F31", "[1]", "[0,4]"), "unknown dtype \"F31\""},
    {"dtype_is_a_number", header_of(R"({"t":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})"), "a number"},
    {"negative_size", one("F32", "[-1]", "[0,4]"), "negative number -1"},
    {"fractional_size", one("F32", "[1.0]", "[0,4]"), "expected an integer"},
    {"size_as_text", one("F32", "[\"1\"]", "[0,4]"), "a string"},
    {"size_beyond_int64", one("F32", "[9223372036854775808]", "[0,4]"), "at most 2^63 - 1"},
    {"size_beyond_uint64", one("F32", "[18446744073709551616]", "[0,4]"), "expected an integer"},
    {"elements_overflow", one("F32", "[4294967296,4294967296]", "[0,4]"), "overflows"},
    {"bits_overflow", one("F64", "[1152921504606846976]", "[0,4]"), "overflows"},
    {"product_wraps_to_the_right_size", one("U8", "[4294967297,4294967296,4]", "[0,4]"), "overflows"},
    {"nested_shape", one("F32", "[[1]]", "[0,4]"), "an array in an array"},
    {"one_offset", one("F32", "[1]", "[0]"), "1 data_offsets"},
    {"three_offsets", one("F32", "[1]", "[0,4,4]"), "3 data_offsets"},
    {"negative_offset", one("F32", "[1]", "[-4,0]"), "negative number"},
    {"ends_before_it_begins", one("F32", "[1]", "[4,0]"), "before it begins"},
    {"ends_past_the_file", one("F32", "[2]", "[0,8]"), "has only 4"},
    {"lies_about_its_size", one("F32", "[2]", "[0,4]"), "need 8"},
    {"lies_about_its_dtype", one("BF16", "[1]", "[0,4]"), "need 2"},
    {"half_a_byte", one("F4", "[7]", "[0,4]"), "whole bytes"},
    {"gap_at_the_front", one("F32", "[1]", "[4,8]", 8), "a gap"},
    {"bytes_after_the_last", one("F32", "[1]", "[0,4]", 9), "the file has 9"},
    {"data_cut_off", one("F32", "[1]", "[0,4]", 3), "has only 3"},
    {"overlap", header_of(R"({"a":)" + tensor("U8", "[3]", "[0,3]") + R"(,"b":)" + tensor("U8", "[2]", "[2,4]") + "}"), "overlaps"},
    {"same_bytes_twice", header_of(R"({"a":)" + tensor("U8", "[4]", "[0,4]") + R"(,"b":)" + tensor("U8", "[4]", "[0,4]") + "}"),
     "overlaps"},
    {"gap_between", header_of(R"({"a":)" + tensor("U8", "[1]", "[0,1]") + R"(,"b":)" + tensor("U8", "[1]", "[3,4]") + "}"), "a gap"},
};

class MalformedHeader : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedHeader, IsRefusedWithItsReason) {
  try {
    parse(GetParam().file);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("f.safetensors"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Table, MalformedHeader, ::testing::ValuesIn(kMalformed), [](const auto& info) { return info.param.name; });

// Control of the table: the file that most rows start from is accepted.
TEST(SafetensorsHeader, AcceptsTheGoodTwinOfTheMalformedOnes) {
  EXPECT_EQ(parse(header_of("{" + kGood + "}")).tensors.at(0).name, "t");
  EXPECT_EQ(parse(one("F4", "[8]", "[0,4]")).tensors.at(0).dtype, "F4");
}

TEST(SafetensorsHeader, EveryCutOfAGoodFileIsRefused) {
  const std::string good = header_of("{" + kGood + "}");
  for (size_t size = 0; size < good.size(); size++) EXPECT_THROW(parse(good.substr(0, size)), Error) << size;
  EXPECT_NO_THROW(parse(good));
}

TEST(SafetensorsHeader, WritesWhatItReads) {
  const std::vector<HeaderTensor> tensors = {{"a", "BF16", {3, 1}, 0, 6}, {"with \"quotes\"", "U8", {4}, 6, 10}};
  for (const int64_t alignment : {8, 256, 4096}) {
    const std::string text = format_safetensors_header(tensors, {{"format", "pt"}}, alignment);
    EXPECT_EQ(text.size() % static_cast<size_t>(alignment), 0);
    const auto header = parse(text + std::string(10, 'x'));
    EXPECT_EQ(header.data_start, static_cast<int64_t>(text.size()));
    ASSERT_EQ(header.tensors.size(), 2);
    EXPECT_EQ(header.tensors[1].name, tensors[1].name);
    EXPECT_EQ(header.tensors[1].shape, tensors[1].shape);
  }
  EXPECT_EQ(format_safetensors_header(tensors, {}, 8, 4096).size(), 4096);
  EXPECT_THROW(format_safetensors_header(tensors, {}, 8, 64), Error);
}

}  // namespace
}  // namespace nybble
