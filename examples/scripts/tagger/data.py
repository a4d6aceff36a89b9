import torch
from torch.nn.utils.rnn import pad_sequence

PAD = 0


def make_sentences(n, vocab, tags, longest):
    sentences = []
    for _ in range(n):
        words = torch.randint(1, vocab, (int(torch.randint(longest // 2, longest + 1, (1,))),))
        sentences.append((words, words % tags))
    return sentences


def collate(longest):
    def pad(batch):
        words = [w for w, _ in batch]
        lengths = torch.tensor([len(w) for w in words])
        words = [torch.cat([w, w.new_full((longest - len(w),), PAD)]) for w in words]
        tags = pad_sequence([t for _, t in batch], batch_first=True, padding_value=-1)
        tags = torch.nn.functional.pad(tags, (0, longest - tags.size(1)), value=-1)
        return torch.stack(words), tags, lengths

    return pad
