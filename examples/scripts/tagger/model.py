from torch import nn

from .data import PAD


class Tagger(nn.Module):
    def __init__(self, vocab, tags, dim, hidden, layers, dropout):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.gru = nn.GRU(
            dim, hidden, layers, batch_first=True, bidirectional=True, dropout=dropout
        )
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * hidden, tags)

    def forward(self, words):
        hidden, _ = self.gru(self.dropout(self.embedding(words)))
        return self.output(self.dropout(hidden))
