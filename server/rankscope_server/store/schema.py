"""
The tables.
"""

import sqlalchemy as sa

VERSION = 1
"""
Raised with each change of the tables that an older server cannot live with.
"""

metadata = sa.MetaData()

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("value", sa.String(256), nullable=False),
)

desired = sa.Table(
    "desired",
    metadata,
    sa.Column("deployment", sa.String(64), primary_key=True),
    sa.Column("engine", sa.String(256), primary_key=True),  # empty: every engine of the deployment
    sa.Column("mitigation", sa.String(32), primary_key=True),
    sa.Column("desired", sa.Boolean, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("actor", sa.String(128), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("actor", sa.String(128), nullable=False),
    sa.Column("deployment", sa.String(64), nullable=False, index=True),
    sa.Column("engine", sa.String(256), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False, default=0),
)

samples = sa.Table(
    "samples",
    metadata,
    sa.Column("deployment", sa.String(64), primary_key=True),
    sa.Column("engine", sa.String(256), primary_key=True),
    sa.Column("dp_rank", sa.Integer, primary_key=True),
    sa.Column("pp_rank", sa.Integer, primary_key=True),
    sa.Column("tp_rank", sa.Integer, primary_key=True),
    sa.Column("second", sa.BigInteger, primary_key=True, index=True),
    sa.Column("drift_max", sa.Integer, nullable=False),
    sa.Column("state_max", sa.Integer, nullable=False),
    sa.Column("steps", sa.Integer, nullable=False),
    sa.Column("requests", sa.Integer, nullable=False),
)

findings = sa.Table(
    "findings",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("deployment", sa.String(64), nullable=False, index=True),
    sa.Column("engine", sa.String(256), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("severity", sa.String(16), nullable=False),
    sa.Column("sentence", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger),
    sa.Column("ranks", sa.Text, nullable=False),
    sa.Column("since", sa.Float, nullable=False),
    sa.Column("found", sa.Float, nullable=False),
    sa.Column("closed", sa.Float),
)

alerts = sa.Table(
    "alerts",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("deployment", sa.String(64), nullable=False),
    sa.Column("engine", sa.String(256), nullable=False),
    sa.Column("subject", sa.String(256), nullable=False),
    sa.Column("severity", sa.String(16), nullable=False),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Column("sources", sa.Text, nullable=False),  # a JSON list
    sa.Column("incident", sa.String(64), nullable=False),
    sa.Column("pending", sa.Float, nullable=False),
    sa.Column("fired", sa.Float, nullable=False),
    sa.Column("resolved", sa.Float, index=True),
    sa.Column("told", sa.Integer, nullable=False),
)

notifications = sa.Table(
    "notifications",
    metadata,
    sa.Column("id", sa.String(48), primary_key=True),
    sa.Column("receiver", sa.String(256), primary_key=True),
    sa.Column("alert", sa.String(32), nullable=False, index=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the notice as JSON, sent again as it was
    sa.Column("made", sa.Float, nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False, index=True),  # waiting, delivered or given up
    sa.Column("settled", sa.Float),
)

incidents = sa.Table(
    "incidents",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("deployment", sa.String(64), nullable=False, index=True),
    sa.Column("engine", sa.String(256), nullable=False),
    sa.Column("opened", sa.Float, nullable=False, index=True),
    sa.Column("closed", sa.Float, index=True),
    sa.Column("state", sa.Text, nullable=False),  # all of it, as JSON
)

captures = sa.Table(
    "captures",
    metadata,
    sa.Column("incident", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
