// Programs of the battery that differ in what they train.

#include <ATen/Functions.h>
#include <torch/nn/utils/rnn.h>

#include <utility>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

namespace F = torch::nn::functional;

// Three steps of AdamW, or of SGD with momentum; `loss_of` takes (run, module, batch).
template <class Module, class LossOf>
void Fit(Run& run, Module module, LossOf loss_of, bool sgd) {
  run.Cast(module);
  auto engine = run.Open();
  auto optimizer = sgd ? engine->SGD(*module, optim::SGDOptions(0.05).momentum(0.9))
                       : engine->AdamW(*module, optim::AdamWOptions(1e-2));
  for (int batch = 0; batch < 3; ++batch) {
    const Tensor loss = loss_of(run, module, batch);
    loss.backward();
    if (batch == 1) run.SeeGradients(*module);
    optimizer->step();
    optimizer->zero_grad();
    run.See(loss);
  }
  run.See(*module);
}

enum Optimizer { kAdamW, kSgd };

// A module that takes one tensor of numbers.
template <class Make>
Program OfNoise(std::string name, Make make, std::vector<int64_t> sizes,
                Optimizer optimizer = kAdamW) {
  return {std::move(name), [=](Run& run) {
            torch::manual_seed(5);
            Fit(
                run, make(),
                [&](Run& run, auto& module, int batch) {
                  return Mean(module->forward(run.Noise(batch, sizes)));
                },
                optimizer == kSgd);
          }};
}

// Torch has no bf16 kernel for it.
Program InFp32(Program program) {
  program.fp32_only = true;
  return program;
}

// One that takes whatever `loss_of` gives it.
template <class Make, class LossOf>
Program Of(std::string name, Make make, LossOf loss_of, Optimizer optimizer = kAdamW) {
  return {std::move(name), [=](Run& run) {
            torch::manual_seed(5);
            Fit(run, make(), loss_of, optimizer == kSgd);
          }};
}

// A module of one's own, with Loss(run, batch).
template <class Net>
Program OfNet(std::string name, Optimizer optimizer = kAdamW) {
  return Of(
      std::move(name), [] { return std::make_shared<Net>(); },
      [](Run& run, auto& net, int batch) { return net->Loss(run, batch); }, optimizer);
}

// Its parameters are tensors, registered without a module.
struct Bare : nn::Module {
  Tensor Add(const char* name, at::IntArrayRef sizes, double scale = 0.05) {
    return register_parameter(name, torch::randn(sizes) * scale);
  }
  // The one that is used: a cast makes others.
  Tensor Get(const char* name) { return named_parameters()[name]; }
};

// A net of bare parameters named a, b and c and a function of them.
using Function = Tensor (*)(Run&, Bare&, int batch);
Program OfTensors(std::string name, std::vector<std::vector<int64_t>> shapes, Function function,
                  Optimizer optimizer = kAdamW) {
  return {std::move(name), [=](Run& run) {
            torch::manual_seed(5);
            auto net = std::make_shared<Bare>();
            const char* const names[] = {"a", "b", "c"};
            for (size_t i = 0; i < shapes.size(); ++i) net->Add(names[i], shapes[i]);
            Fit(
                run, net,
                [&](Run& run, auto& net, int batch) {
                  return function(run, *net, batch).to(at::kFloat).square().mean();
                },
                optimizer == kSgd);
          }};
}

// ---- Nets of one's own -------------------------------------------------------------------------

struct ConvNet : nn::Module {
  ConvNet() {
    body = register_module(
        "body",
        nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 64, 3).padding(1).bias(false)),
                       nn::BatchNorm2d(64), nn::ReLU(), nn::MaxPool2d(2),
                       nn::Conv2d(nn::Conv2dOptions(64, 256, 3).groups(4).dilation(2).padding(2)),
                       nn::GroupNorm(8, 256), nn::SiLU(), nn::AdaptiveAvgPool2d(2), nn::Flatten(),
                       nn::Linear(1024, 10)));
  }
  Tensor Loss(Run& run, int batch) {
    return F::cross_entropy(body->forward(run.Noise(batch, {4, 3, 12, 12})).to(at::kFloat),
                            run.Indices(batch, 10, {4}));
  }
  nn::Sequential body{nullptr};
};

struct TiedLanguageModel : nn::Module {
  TiedLanguageModel() {
    embedding = register_module("embedding", nn::Embedding(700, 192));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(192, 192).num_layers(2).dropout(0.2)));
    head = register_module("head", nn::Linear(nn::LinearOptions(192, 700)));
    head->weight = embedding->weight;  // used, but registered as another
  }
  Tensor Loss(Run& run, int batch) {
    const Tensor tokens = run.Indices(batch, 700, {7, 3});
    const Tensor hidden = std::get<0>(lstm(embedding(tokens)));
    return F::cross_entropy(
        F::linear(hidden, embedding->weight, head->bias).to(at::kFloat).view({-1, 700}),
        tokens.view(-1));
  }
  nn::Embedding embedding{nullptr};
  nn::LSTM lstm{nullptr};
  nn::Linear head{nullptr};
};

struct RegisteredTwice : nn::Module {
  RegisteredTwice() {
    first = register_module("first", nn::Linear(kWidth, kInner));
    second = register_module("second", nn::Linear(kInner, kWidth));
    again = register_module("again", first);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  }
  Tensor Loss(Run& run, int batch) {
    const Tensor x = run.Noise(batch, {5, kWidth});
    return Mean(again(norm(second(torch::relu(first(x))))));
  }
  nn::Linear first{nullptr}, second{nullptr}, again{nullptr};
  nn::LayerNorm norm{nullptr};
};

struct Lists : nn::Module {
  Lists() {
    layers = register_module("layers", nn::ModuleList());
    for (int i = 0; i < 3; ++i) layers->push_back(nn::Linear(kWidth, kWidth));
    const std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>> sides = {
        {"left", nn::Linear(kWidth, 8).ptr()}, {"right", nn::Linear(kWidth, 8).ptr()}};
    heads = register_module("heads", nn::ModuleDict(sides));
    scales = register_module("scales", nn::ParameterList());
    for (int i = 0; i < 3; ++i) scales->append(torch::full({kWidth}, 1 + 0.1 * i));
    shifts = register_module("shifts", nn::ParameterDict());
    shifts->insert("left", torch::full({8}, 0.5));
    shifts->insert("right", torch::zeros({8}));
  }
  Tensor Loss(Run& run, int batch) {
    Tensor x = run.Noise(batch, {5, kWidth});
    for (size_t i = 0; i < layers->size(); ++i)
      x = torch::tanh(layers->at<nn::LinearImpl>(i).forward(x)) * (*scales)[i];
    const char* const side = batch % 2 == 0 ? "left" : "right";
    return Mean((*heads)[side]->as<nn::LinearImpl>()->forward(x) + (*shifts)[side]);
  }
  nn::ModuleList layers{nullptr};
  nn::ModuleDict heads{nullptr};
  nn::ParameterList scales{nullptr};
  nn::ParameterDict shifts{nullptr};
};

// The largest singular value is estimated by a step of power iteration, whose vector is a buffer.
struct SpectralNorm : nn::Module {
  SpectralNorm() {
    weight = register_parameter("weight", torch::randn({kInner, kWidth}) * 0.1);
    u = register_buffer("u",
                        F::normalize(torch::randn({kInner}), F::NormalizeFuncOptions().dim(0)));
  }
  Tensor Loss(Run& run, int batch) {
    Tensor v;
    {
      const torch::NoGradGuard no_grad;
      v = F::normalize(weight.t().mv(u), F::NormalizeFuncOptions().dim(0));
      u.copy_(F::normalize(weight.mv(v), F::NormalizeFuncOptions().dim(0)));
    }
    const Tensor sigma = u.clone().dot(weight.mv(v.clone()));
    return Mean(F::linear(run.Noise(batch, {3, kWidth}), weight / sigma));
  }
  Tensor weight, u;
};

struct WeightNorm : nn::Module {
  WeightNorm() {
    v = register_parameter("v", torch::randn({kInner, kWidth}) * 0.1);
    g = register_parameter("g", v.detach().norm(2, 1, true));
  }
  Tensor Loss(Run& run, int batch) {
    return Mean(F::linear(run.Noise(batch, {3, kWidth}), v * (g / v.norm(2, 1, true))));
  }
  Tensor v, g;
};

struct Masked : nn::Module {
  Masked() {
    weight = register_parameter("weight", torch::randn({kWidth, kWidth}) * 0.1);
    mask = register_buffer("mask", torch::rand({kWidth, kWidth}) > 0.5);
    count = register_buffer("count", torch::zeros({}, at::kLong));
  }
  Tensor Loss(Run& run, int batch) {
    count.add_(1);
    return Mean(torch::matmul(run.Noise(batch, {3, kWidth}), weight * mask) /
                count.item<int64_t>());
  }
  Tensor weight, mask, count;
};

struct PartlyUsed : nn::Module {
  PartlyUsed() {
    for (int i = 0; i < 3; ++i)
      ways.push_back(register_module("way" + std::to_string(i), nn::Linear(kWidth, kWidth)));
    unused = register_module("unused", nn::Linear(kWidth, kInner));
  }
  Tensor Loss(Run& run, int batch) { return Mean(ways[batch % 2](run.Noise(batch, {3, kWidth}))); }
  std::vector<nn::Linear> ways;
  nn::Linear unused{nullptr};
};

// A function with a backward of its own, which keeps the weight.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

struct Frozen : nn::Module {
  Frozen() {
    trunk = register_module("trunk", nn::Linear(kWidth, kInner));
    head = register_module("head", nn::Linear(kInner, 16));
    for (Tensor& parameter : trunk->parameters()) parameter.set_requires_grad(false);
    steps = register_parameter("steps", torch::full({}, 3.0), /*requires_grad=*/false);
  }
  Tensor Loss(Run& run, int batch) {
    return Mean(head(torch::tanh(trunk(run.Noise(batch, {4, kWidth})) / steps)));
  }
  nn::Linear trunk{nullptr}, head{nullptr};
  Tensor steps;
};

nn::TransformerEncoder MakeEncoder() {
  return nn::TransformerEncoder(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(128, 4).dim_feedforward(256).dropout(0.1), 2));
}

struct EncodedText : nn::Module {
  EncodedText() {
    embedding = register_module("embedding", nn::Embedding(400, 128));
    encoder = register_module("encoder", MakeEncoder());
    positions = register_buffer("positions", torch::randn({12, 1, 128}) * 0.1);
  }
  Tensor Loss(Run& run, int batch) {
    const Tensor tokens = run.Indices(batch, 400, {9, 2});
    const Tensor mask = nn::TransformerImpl::generate_square_subsequent_mask(9).to(run.dtype());
    const Tensor coded = encoder(embedding(tokens) + positions.slice(0, 0, 9), mask);
    return F::cross_entropy(F::linear(coded, embedding->weight).to(at::kFloat).view({-1, 400}),
                            tokens.view(-1));
  }
  nn::Embedding embedding{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  Tensor positions;
};

struct Packed : nn::Module {
  Packed() { gru = register_module("gru", nn::GRU(nn::GRUOptions(64, 128).bidirectional(true))); }
  Tensor Loss(Run& run, int batch) {
    const auto packed = nn::utils::rnn::pack_padded_sequence(run.Noise(batch, {6, 3, 64}),
                                                             torch::tensor({6, 4, 2}));
    const auto out = std::get<0>(gru->forward_with_packed_input(packed));
    return Mean(std::get<0>(nn::utils::rnn::pad_packed_sequence(out)));
  }
  nn::GRU gru{nullptr};
};

struct Cells : nn::Module {
  Cells() {
    lstm = register_module("lstm", nn::LSTMCell(96, 128));
    gru = register_module("gru", nn::GRUCell(128, 96));
    rnn = register_module("rnn", nn::RNNCell(nn::RNNCellOptions(96, 64)));
  }
  Tensor Loss(Run& run, int batch) {
    Tensor h = torch::zeros({2, 128}, run.dtype()), c = torch::zeros({2, 128}, run.dtype());
    Tensor g = torch::zeros({2, 96}, run.dtype()), r = torch::zeros({2, 64}, run.dtype());
    for (int t = 0; t < 4; ++t) {
      std::tie(h, c) = lstm(run.Noise(batch * 10 + t, {2, 96}), std::make_tuple(h, c));
      g = gru(h, g);
      r = rnn(g, r);
    }
    return Mean(r) + Mean(h);
  }
  nn::LSTMCell lstm{nullptr};
  nn::GRUCell gru{nullptr};
  nn::RNNCell rnn{nullptr};
};

struct Siamese : nn::Module {
  Siamese() {
    body =
        register_module("body", nn::Sequential(nn::Linear(kWidth, kInner),
                                               nn::PReLU(nn::PReLUOptions().num_parameters(kInner)),
                                               nn::Linear(kInner, 32)));
  }
  Tensor Loss(Run& run, int batch) {
    const auto code = [&](int seed) { return body->forward(run.Noise(seed, {4, kWidth})); };
    return F::triplet_margin_loss(code(batch * 3), code(batch * 3 + 1), code(batch * 3 + 2))
               .to(at::kFloat) +
           F::cosine_embedding_loss(code(batch), code(batch + 7), torch::ones({4})).to(at::kFloat);
  }
  nn::Sequential body{nullptr};
};

struct MixtureOfExperts : nn::Module {
  MixtureOfExperts() {
    gate = register_module("gate", nn::Linear(kWidth, 4));
    up = register_parameter("up", torch::randn({4, kWidth, 300}) * 0.05);
    down = register_parameter("down", torch::randn({4, 300, kWidth}) * 0.05);
  }
  Tensor Loss(Run& run, int batch) {
    const Tensor x = run.Noise(batch, {6, kWidth});
    const Tensor weights = torch::softmax(gate(x), -1);
    const auto [value, expert] = weights.max(-1);
    Tensor out = torch::zeros_like(x);
    for (int64_t e = 0; e < 4; ++e) {
      const Tensor rows = (expert == e).nonzero().view(-1);
      if (rows.numel() == 0) continue;
      const Tensor y = torch::relu(x.index_select(0, rows).mm(up[e])).mm(down[e]);
      out = out.index_add(0, rows, y * value.index_select(0, rows).unsqueeze(1));
    }
    return Mean(out - x);
  }
  nn::Linear gate{nullptr};
  Tensor up, down;
};

}  // namespace

Programs ModulePrograms() {
  const auto take_first = [](auto tuple) { return std::get<0>(tuple); };
  Programs programs = {
      OfNoise("linear_without_bias",
              [] { return nn::Linear(nn::LinearOptions(kWidth, kInner).bias(false)); },
              {3, kWidth}),
      Of(
          "bilinear", [] { return nn::Bilinear(40, 50, 30); },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Noise(b, {4, 40}), run.Noise(b + 50, {4, 50})));
          }),
      OfNoise("conv1d",
              [] { return nn::Conv1d(nn::Conv1dOptions(48, 128, 5).stride(2).padding(3)); },
              {2, 48, 20}),
      OfNoise(
          "conv2d_replicate",
          [] {
            return nn::Conv2d(
                nn::Conv2dOptions(16, 64, 5).padding(2).padding_mode(torch::kReplicate));
          },
          {2, 16, 9, 9}, kSgd),
      OfNoise("conv2d_depthwise",
              [] { return nn::Conv2d(nn::Conv2dOptions(64, 64, 3).groups(64)); }, {2, 64, 8, 8}),
      OfNoise("conv2d_pointwise", [] { return nn::Conv2d(256, 512, 1); }, {2, 256, 4, 4}),
      OfNoise("conv3d", [] { return nn::Conv3d(nn::Conv3dOptions(8, 24, 3).bias(false)); },
              {1, 8, 5, 6, 7}),
      OfNoise(
          "conv_transpose1d",
          [] { return nn::ConvTranspose1d(nn::ConvTranspose1dOptions(32, 64, 4).stride(2)); },
          {2, 32, 6}, kSgd),
      OfNoise("conv_transpose2d",
              [] {
                return nn::ConvTranspose2d(
                    nn::ConvTranspose2dOptions(32, 48, 3).stride(2).output_padding(1).padding(1));
              },
              {2, 32, 5, 5}),
      OfNoise("conv_transpose3d", [] { return nn::ConvTranspose3d(8, 6, 3); }, {1, 8, 3, 4, 5}),
      OfNoise("batch_norm1d",
              [] { return nn::Sequential(nn::Linear(kWidth, kInner), nn::BatchNorm1d(kInner)); },
              {8, kWidth}),
      OfNoise(
          "batch_norm2d_cumulative",
          [] {
            return nn::Sequential(
                nn::Conv2d(3, 32, 3),
                nn::BatchNorm2d(nn::BatchNorm2dOptions(32).momentum(std::nullopt)));
          },
          {4, 3, 7, 7}, kSgd),
      OfNoise("batch_norm3d_without_statistics",
              [] { return nn::BatchNorm3d(nn::BatchNorm3dOptions(4).track_running_stats(false)); },
              {2, 4, 3, 3, 3}),
      OfNoise("instance_norm",
              [] {
                return nn::Sequential(
                    nn::Conv2d(3, 32, 3),
                    nn::InstanceNorm2d(
                        nn::InstanceNorm2dOptions(32).affine(true).track_running_stats(true)));
              },
              {2, 3, 8, 8}),
      OfNoise("group_norm",
              [] { return nn::Sequential(nn::Linear(kWidth, kInner), nn::GroupNorm(4, kInner)); },
              {3, kWidth}),
      OfNoise(
          "layer_norm_of_two_dimensions",
          [] {
            return nn::LayerNorm(nn::LayerNormOptions({20, 300}));
          },
          {2, 20, 300}, kSgd),
      InFp32(OfNoise("local_response_norm",
                     [] {
                       return nn::Sequential(nn::Conv2d(3, 16, 3), nn::LocalResponseNorm(3),
                                             nn::CrossMapLRN2d(3));
                     },
                     {2, 3, 8, 8})),
      OfNoise("activations_with_parameters",
              [] {
                return nn::Sequential(nn::Linear(kWidth, kInner), nn::PReLU(), nn::RReLU(),
                                      nn::Linear(kInner, kWidth), nn::GLU(), nn::ELU(), nn::CELU(),
                                      nn::Mish());
              },
              {3, kWidth}),
      OfNoise("dropouts",
              [] {
                return nn::Sequential(nn::Linear(kWidth, kInner), nn::Dropout(0.3), nn::SELU(),
                                      nn::AlphaDropout(0.2), nn::Linear(kInner, kWidth),
                                      nn::FeatureAlphaDropout(0.1));
              },
              {4, kWidth}),
      OfNoise("upsampling",
              [] {
                return nn::Sequential(nn::Conv2d(3, 32, 3), nn::PixelShuffle(2),
                                      nn::Upsample(nn::UpsampleOptions()
                                                       .scale_factor(std::vector<double>{2, 2})
                                                       .mode(torch::kBilinear)
                                                       .align_corners(false)),
                                      nn::Conv2d(8, 4, 3));
              },
              {1, 3, 6, 6}),
      Of(
          "embedding_with_padding",
          [] { return nn::Embedding(nn::EmbeddingOptions(1000, 200).padding_idx(3)); },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Indices(b, 1000, {5, 4})));
          }),
      Of(
          "embedding_renormalised_in_forward",
          [] { return nn::Embedding(nn::EmbeddingOptions(900, 200).max_norm(1.0)); },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Indices(b, 900, {5, 4})));
          },
          kSgd),
      Of(
          "embedding_scaled_by_frequency",
          [] { return nn::Embedding(nn::EmbeddingOptions(50, 900).scale_grad_by_freq(true)); },
          [](Run& run, auto& m, int b) { return Mean(m->forward(run.Indices(b, 50, {40}))); }),
      Of(
          "embedding_sparse",
          [] { return nn::Embedding(nn::EmbeddingOptions(1000, 200).sparse(true)); },
          [](Run& run, auto& m, int b) { return Mean(m->forward(run.Indices(b, 1000, {12}))); }),
      Of(
          "embedding_bag_mean", [] { return nn::EmbeddingBag(500, 300); },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Indices(b, 500, {10}), torch::tensor({0, 3, 7})));
          }),
      Of(
          "embedding_bag_max",
          [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(500, 300).mode(torch::kMax)); },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Indices(b, 500, {4, 6})));
          },
          kSgd),
      Of(
          "embedding_bag_weighted",
          [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(500, 300).mode(torch::kSum)); },
          [](Run& run, auto& m, int b) {
            return Mean(
                m->forward(run.Indices(b, 500, {10}), torch::tensor({0, 4}), run.Noise(b, {10})));
          }),
      Of(
          "rnn_tanh", [] { return nn::RNN(nn::RNNOptions(64, 160).num_layers(2)); },
          [=](Run& run, auto& m, int b) {
            return Mean(take_first(m->forward(run.Noise(b, {5, 2, 64}))));
          }),
      Of(
          "rnn_relu_both_ways",
          [] {
            return nn::RNN(nn::RNNOptions(64, 96).nonlinearity(torch::kReLU).bidirectional(true));
          },
          [=](Run& run, auto& m, int b) {
            return Mean(take_first(m->forward(run.Noise(b, {5, 2, 64}))));
          },
          kSgd),
      Of(
          "lstm_projected", [] { return nn::LSTM(nn::LSTMOptions(64, 128).proj_size(32)); },
          [=](Run& run, auto& m, int b) {
            return Mean(take_first(m->forward(run.Noise(b, {5, 2, 64}))));
          }),
      Of(
          "lstm_large",
          [] { return nn::LSTM(nn::LSTMOptions(128, 320).num_layers(2).batch_first(true)); },
          [=](Run& run, auto& m, int b) {
            return Mean(take_first(m->forward(run.Noise(b, {2, 5, 128}))));
          },
          kSgd),
      Of(
          "gru_large", [] { return nn::GRU(nn::GRUOptions(128, 320).bidirectional(true)); },
          [=](Run& run, auto& m, int b) {
            return Mean(take_first(m->forward(run.Noise(b, {4, 2, 128}))));
          }),
      OfNet<Packed>("gru_of_packed_sequences"),
      OfNet<Cells>("recurrent_cells", kSgd),
      Of(
          "attention",
          [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(256, 4).dropout(0.1)); },
          [=](Run& run, auto& m, int b) {
            const Tensor x = run.Noise(b, {5, 2, 256});
            return Mean(take_first(m->forward(x, x, x)));
          }),
      Of(
          "attention_of_other_widths",
          [] {
            return nn::MultiheadAttention(nn::MultiheadAttentionOptions(128, 4)
                                              .kdim(96)
                                              .vdim(96)
                                              .add_bias_kv(true)
                                              .add_zero_attn(true));
          },
          [=](Run& run, auto& m, int b) {
            return Mean(take_first(m->forward(run.Noise(b, {5, 2, 128}), run.Noise(b, {6, 2, 96}),
                                              run.Noise(b + 50, {6, 2, 96}))));
          },
          kSgd),
      OfNet<EncodedText>("transformer_encoder"),
      Of(
          "transformer_decoder",
          [] {
            return nn::TransformerDecoder(nn::TransformerDecoderOptions(
                nn::TransformerDecoderLayerOptions(128, 4).dim_feedforward(256).dropout(0), 2));
          },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Noise(b, {5, 2, 128}), run.Noise(b + 50, {7, 2, 128})));
          }),
      Of(
          "transformer",
          [] { return nn::Transformer(nn::TransformerOptions(64, 4, 1, 1).dim_feedforward(256)); },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Noise(b, {5, 2, 64}), run.Noise(b + 50, {4, 2, 64})));
          },
          kSgd),
      Of(
          "adaptive_softmax",
          [] {
            return nn::AdaptiveLogSoftmaxWithLoss(
                nn::AdaptiveLogSoftmaxWithLossOptions(64, 900, {100, 400}).div_value(2.0));
          },
          [](Run& run, auto& m, int b) {
            return Mean(m->forward(run.Noise(b, {12, 64}), run.Indices(b, 900, {12})).output);
          }),
      OfNet<ConvNet>("conv_net"),
      OfNet<ConvNet>("conv_net_sgd", kSgd),
      OfNet<TiedLanguageModel>("tied_language_model"),
      OfNet<RegisteredTwice>("module_registered_twice"),
      OfNet<Lists>("lists_and_dictionaries"),
      OfNet<SpectralNorm>("spectral_norm_by_hand"),
      OfNet<WeightNorm>("weight_norm_by_hand", kSgd),
      OfNet<Masked>("masked_weight"),
      OfNet<PartlyUsed>("partly_used"),
      OfNet<Frozen>("frozen_trunk"),
      OfNet<Siamese>("siamese"),
      OfNet<MixtureOfExperts>("mixture_of_experts"),
      OfTensors("own_autograd_function", {{kWidth, kInner}},
                [](Run& run, Bare& net, int b) {
                  return OwnLinear::apply(run.Noise(b, {3, kWidth}), net.Get("a"));
                }),
      OfTensors("einsum", {{kWidth, 30, 40}, {40, kWidth}},
                [](Run& run, Bare& net, int b) {
                  return torch::einsum("bi,ijk,kl->bjl",
                                       {run.Noise(b, {3, kWidth}), net.Get("a"), net.Get("b")});
                }),
      OfTensors("batched_product", {{4, kWidth, 200}},
                [](Run& run, Bare& net, int b) {
                  return torch::bmm(run.Noise(b, {4, 3, kWidth}), net.Get("a"));
                }),
      OfTensors("concatenated_weights", {{kWidth, 300}, {kWidth, 200}, {kWidth, 400}},
                [](Run& run, Bare& net, int b) {
                  return run.Noise(b, {3, kWidth})
                      .mm(torch::cat({net.Get("a"), net.Get("b"), net.Get("c")}, 1));
                }),
      OfTensors(
          "stacked_weights", {{300, 300}, {300, 300}, {300, 300}},
          [](Run& run, Bare& net, int b) {
            return torch::stack({net.Get("a"), net.Get("b"), net.Get("c")})
                .mean(0)
                .mm(run.Noise(b, {300, 3}));
          },
          kSgd),
      OfTensors("split_weight", {{3 * kWidth, kWidth}},
                [](Run& run, Bare& net, int b) {
                  const auto parts = net.Get("a").chunk(3);
                  const Tensor x = run.Noise(b, {3, kWidth});
                  return x.mm(parts[0].t()) * x.mm(parts[1].t()) + x.mm(parts[2].t());
                }),
      OfTensors(
          "indexed_weight", {{900, 300}},
          [](Run& run, Bare& net, int b) {
            using torch::indexing::Slice;
            const Tensor rows = run.Indices(b, 900, {20});
            return net.Get("a").index({rows, Slice(3, 90)}) +
                   net.Get("a").index_select(0, rows).slice(1, 100, 187) +
                   net.Get("a").gather(1, run.Indices(b, 300, {20, 87}));
          },
          kSgd),
      OfTensors("weight_by_mask", {{kWidth, kWidth}},
                [](Run& run, Bare& net, int b) {
                  const Tensor a = net.Get("a");
                  return a.masked_select(a > 0).sum() * a.masked_fill(a < 0, 0.5) +
                         torch::where(a > 0.01, a, run.Noise(b, {kWidth, kWidth}));
                }),
      OfTensors("sorted_weight", {{kWidth, kWidth}},
                [](Run&, Bare& net, int) {
                  const auto [values, indices] = net.Get("a").sort(1);
                  return values.cumsum(1) * std::get<0>(net.Get("a").topk(kWidth, 0));
                }),
      OfTensors(
          "strided_weight", {{600, 400}},
          [](Run& run, Bare& net, int b) {
            return net.Get("a").as_strided({100, 100}, {400, 3}, 7).mm(run.Noise(b, {100, 2})) +
                   net.Get("a").diagonal().sum() + net.Get("a").unfold(0, 50, 100).mean();
          }),
      OfTensors("expanded_scalar", {{}, {1, 300}},
                [](Run& run, Bare& net, int b) {
                  return net.Get("a").expand({4, 300}) * net.Get("b").expand({4, -1}) *
                         run.Noise(b, {4, 300});
                }),
      OfTensors("empty_parameter", {{0, 7}, {kWidth, 3}},
                [](Run& run, Bare& net, int b) {
                  return torch::cat({net.Get("a").reshape({0}),
                                     run.Noise(b, {2, kWidth}).mm(net.Get("b")).view(-1)});
                }),
      OfTensors("five_dimensions", {{2, 3, 4, 5, 600}},
                [](Run& run, Bare& net, int b) {
                  return net.Get("a").permute({4, 0, 2, 1, 3}).contiguous() * run.Noise(b, {3, 5});
                }),
      OfTensors("linear_algebra", {{160, 160}},
                [](Run& run, Bare& net, int b) {
                  const Tensor a = net.Get("a").to(at::kFloat) + torch::eye(160) * 4;
                  return at::linalg_solve(a, run.Noise(b, {160, 2}).to(at::kFloat)) +
                         at::linalg_inv(a).mean() + torch::logdet(a.mm(a.t()));
                }),
      OfTensors("weight_in_fourier_space", {{300, 256}},
                [](Run& run, Bare& net, int b) {
                  const Tensor spectrum = at::fft_rfft(net.Get("a").to(at::kFloat));
                  return at::fft_irfft(spectrum * at::fft_rfft(run.Noise(b, {256}).to(at::kFloat)));
                }),
      OfTensors("complex_view_of_weight", {{300, 128, 2}},
                [](Run& run, Bare& net, int b) {
                  const Tensor z = torch::view_as_complex(net.Get("a").to(at::kFloat));
                  return torch::view_as_real(z * z.conj() + z) * run.Noise(b, {2}).to(at::kFloat);
                }),
      OfTensors("distances_to_prototypes", {{500, 128}},
                [](Run& run, Bare& net, int b) {
                  return torch::cdist(run.Noise(b, {4, 128}).to(at::kFloat),
                                      net.Get("a").to(at::kFloat))
                      .min();
                }),
      OfTensors("in_place_on_copies", {{kWidth, kWidth}},
                [](Run& run, Bare& net, int b) {
                  Tensor copy = net.Get("a").clone();
                  copy.mul_(2).add_(net.Get("a"), 0.5);
                  copy.index_put_({torch::tensor({1, 2})}, run.Noise(b, {2, kWidth}));
                  copy.select(0, 5).zero_();
                  return copy;
                }),
      OfTensors("a_weight_of_several_extents", {{1100, 700}},
                [](Run& run, Bare& net, int b) {
                  return run.Noise(b, {2, 1100}).mm(net.Get("a"));
                }),
      OfTensors(
          "scaled_dot_product", {{3 * 256, 256}},
          [](Run& run, Bare& net, int b) {
            const auto qkv =
                F::linear(run.Noise(b, {2, 8, 256}), net.Get("a")).view({2, 8, 3, 4, 64}).unbind(2);
            return at::scaled_dot_product_attention(qkv[0].transpose(1, 2), qkv[1].transpose(1, 2),
                                                    qkv[2].transpose(1, 2), {}, 0.0, true);
          }),
      OfTensors("grid_sample_of_weight", {{1, 4, 120, 130}},
                [](Run& run, Bare& net, int b) {
                  return F::grid_sample(net.Get("a").to(at::kFloat),
                                        run.Noise(b, {1, 5, 5, 2}).to(at::kFloat).tanh(),
                                        F::GridSampleFuncOptions().align_corners(false));
                }),
  };
  return programs;
}

}  // namespace offload::battery
